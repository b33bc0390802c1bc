"""What a machine with a GPU can tell about MegaRL, in one command: see ``__main__``."""
