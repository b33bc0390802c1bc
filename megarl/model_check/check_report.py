"""The output of ``megarl check-model``."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megarl.config.problems import correct_model_path
from megarl.errors import UsageError
from megarl.model_check.checks import Status, check_model
from megarl.texts import printable

_COLORS: dict[Status, str] = {"passed": "green", "failed": "red", "skipped": "yellow"}


def report(model: Path, workspace: Path | None, *, as_json: bool) -> bool:
    """Prints the finding of each check as it ends; returns whether none has failed.

    Raises:
        UsageError: the model's directory has no config.json, or the workspace exists.
    """
    if not (model / "config.json").is_file():
        raise UsageError(f"{model} has no config.json; {correct_model_path(str(model))}")
    console = Console(highlight=False, soft_wrap=True)
    passed = True
    with ExitStack() as stack:
        # A check ends the run that it waits for, and the files are removed.
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        stack.callback(signal.signal, signal.SIGTERM, before)
        if workspace is None:
            temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            workspace = Path(stack.enter_context(temporary))
        elif workspace.exists():
            raise UsageError(f"{workspace} exists; choose a new directory for --keep")
        else:
            workspace.mkdir(parents=True)
        for finding in check_model(model, workspace.absolute()):
            passed = passed and finding.status != "failed"
            if as_json:
                print(json.dumps(asdict(finding)), flush=True)
                continue
            status = Text(f"{finding.status:8}", style=_COLORS[finding.status])
            console.print(status, f"{finding.check:22}", Text(printable(finding.detail)))
    return passed
