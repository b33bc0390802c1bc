"""`megarl checkpoints`: the checkpoints of a run, why each stays, and whether its files are intact."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from megarl.config.schema import CheckpointSettings
from megarl.errors import UsageError
from megarl.files import format_bytes
from megarl.run.checkpoints import (
    MANIFEST,
    BrokenCheckpointError,
    CheckpointManifest,
    Checkpoints,
    best_values,
    reasons_to_keep,
)
from megarl.run.paths import RunPaths, is_locked, read_config
from megarl.run.status.format import clock


def list_checkpoints(run: Path, *, verify: bool = False, console: Console | None = None) -> bool:
    """Prints the checkpoints of a run; returns whether none is found to be damaged.

    Args:
        verify: read all files, and compare them with their digests; else only the manifests and the files' sizes.

    Raises:
        UsageError: the directory has no run that trains.
    """
    paths = RunPaths(run)
    console = console or Console(highlight=False)
    settings = _settings(paths)
    checkpoints = Checkpoints(paths.checkpoint_dir, settings.keep)
    steps = checkpoints.steps()
    values = best_values(settings.best, paths.evaluations)
    reasons = reasons_to_keep(settings, steps, paths.evaluations)
    table = Table(box=None)
    problems = list[str]()
    now = time.time()
    table.add_column("step", justify="right")
    table.add_column("written")
    table.add_column("size", justify="right")
    if settings.best is not None:
        table.add_column(settings.best.metric, justify="right")
    table.add_column("kept because")
    table.add_column("files")
    for step in steps:
        directory = paths.checkpoint_dir / f"step-{step}"
        size = ""
        written = ""
        state = "damaged"
        try:
            manifest = CheckpointManifest.read(directory)
            size = format_bytes(sum(record.nbytes for _, record in manifest.files()))
            written = clock((directory / MANIFEST).stat().st_mtime, now)
            manifest.verify(directory, digests=verify)
            state = "intact" if verify else "complete"
        except (BrokenCheckpointError, FileNotFoundError) as error:
            if not directory.exists():  # the run has removed it meanwhile
                continue
            problems.append(str(error))
        value = [] if settings.best is None else [f"{values[step]:.4g}" if step in values else ""]
        table.add_row(str(step), written, size, *value, ", ".join(reasons.get(step, ())), state)
    if table.row_count:
        console.print(table)
    else:
        console.print(f"{run} has no checkpoint")
    if (staged := checkpoints.staged_step()) is not None:
        end = "is being written" if is_locked(paths.lock) else "was not finished; the next start removes it"
        console.print(f"that of step {staged} {end}", soft_wrap=True)
    for problem in problems:
        console.print(problem, style="red", markup=False, soft_wrap=True)
    return not problems


def _settings(paths: RunPaths) -> CheckpointSettings:
    config = read_config(paths.config)
    if "checkpoint" not in config:
        raise UsageError(f"{paths.path} has no run that trains; give its run.dir")
    try:
        return CheckpointSettings.model_validate(config.get("checkpoint", {}))
    except ValidationError as error:
        raise UsageError(f"{paths.config}: checkpoint: {error.errors()[0]['msg']}") from None
