"""One algebra for all weight movement: canonical regions, specs per architecture, the planner, HF files."""
