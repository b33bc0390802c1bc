"""What every algorithm makes of the demo's task, and GRPO of one of several turns: three seeds of one fine-tuned model.

    python -m benchmarks.learning                              what is done and what is missing
    python -m benchmarks.learning --algorithm grpo --seed 0    one cell
    python -m benchmarks.learning --algorithm decoupled_ppo --staleness 2 --seed 0
    python -m benchmarks.learning --all                        all that are missing, one after the other
    python -m benchmarks.learning --report                     docs/learning.md and its picture, from the cells

A cell is `megarl train` of a file in configs/learning with a seed and, for some, an age of the samples; from where the
repository is. A cell that was interrupted goes on from its last checkpoint. The first one makes the models that all
start from, in runs/learning; results are small files in benchmarks/results/learning. A result of a file that has
changed since is missing again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.learning.cells import CELLS, ROWS, STALE, STALENESS, Cell
from benchmarks.learning.page import report
from benchmarks.learning.training import work


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=sorted({name for name, _ in ROWS}))
    parser.add_argument("--staleness", type=int, choices=STALENESS, help="of decoupled_ppo and coupled_ppo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="all that are missing, one after the other")
    parser.add_argument("--report", action="store_true", help="write the page and its picture")
    options = parser.parse_args(arguments)
    if (options.algorithm in STALE) == (options.staleness is None):
        parser.error(f"--staleness belongs to {' and '.join(STALE)}, which need it")
    if options.report:
        report()
    elif options.algorithm is not None:
        work(Cell(algorithm=options.algorithm, seed=options.seed, staleness=options.staleness))
    else:
        for cell in CELLS:
            missing = cell.read() is None
            if options.all and missing:
                work(cell)
            elif not options.all:
                print(f"{cell.name:20} {'missing' if missing else 'done'}")


if __name__ == "__main__":
    main(sys.argv[1:])
