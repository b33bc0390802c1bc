"""The checkpoint converter as a tool of its own; everything is in ``megarl.convert``."""
