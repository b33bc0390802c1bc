"""Experiment scripts for NeMo-Run: ``python -m launchers.ppo`` and ``python -m launchers.pipeline``."""

import sys
import warnings
from importlib.util import find_spec

if find_spec("nemo_run") is None:
    print("NeMo-Run is not installed here: make nemo-run, then", file=sys.stderr, end=" ")
    print(".venv-nemo-run/bin/python -m launchers.ppo ...", file=sys.stderr)
    raise SystemExit(2)

warnings.filterwarnings("ignore", module="fastapi")  # of a module that NeMo-Run's leptonai imports
