"""The stages of a run: for each a folder with its configuration (`config.py`) and its program (`trainer.py`)."""
