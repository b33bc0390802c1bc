"""``python -m megarl``: the command line."""

from megarl.cli import main

main()
