"""The ways in which weights go from trainers to engines; ``transfer.py`` is what a way has to do."""
