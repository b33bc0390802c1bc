"""What going on with a run demands: a configuration that fits its checkpoint, and files that end where it does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import yaml

from megarl.config import Problem, TrainingConfig
from megarl.config.problems import shown
from megarl.files import sync
from megarl.run.checkpoints import Checkpoint

_WEIGHTS = "the checkpoints have its weights"
_STREAM = "the checkpoints have its place in this data"
_MISSING = "(missing)"
_HEAD = "its scores would mean something else from here on"

FIXED: Final[Mapping[str, str]] = {
    "model": _WEIGHTS,
    "run.seed": "the order of the data and the seeds of the samples follow from it",
    "data.prompts": _STREAM,
    "data.random": _STREAM,
    "data.train": _STREAM,
    "data.chat_template": _STREAM,
    "data.max_tokens": _STREAM,
    "data.too_long": _STREAM,
    "data.empty": _STREAM,
    "data.equal": _STREAM,
    "critic.path": _WEIGHTS,
    "critic.head": _WEIGHTS,
    "critic.head_std": _WEIGHTS,
    "critic.head_seed": _WEIGHTS,
    "critic.value_norm": "the values are of the scale of its moments, which the checkpoints have",
    "reward.path": _HEAD,
    "reward.head_std": _HEAD,
    "reward.head_seed": _HEAD,
    "normalisation.before": "the head was scaled before the first step, or it was not",
    "actor.ema": "the checkpoints have the average",
    "algo.kl": "the checkpoints have the state of its controller, and of a reference that follows the actor",
    "ptx.data": _STREAM,
    "ptx.max_tokens": _STREAM,
    "ptx.loss_on": _STREAM,
    "ptx.chat_template": _STREAM,
}
"""Fields, sections with all of theirs included, that a run keeps, and why; the others hold from the next step on."""


def broken_promises(old: str, config: TrainingConfig, latest: Checkpoint | None) -> tuple[list[Problem], bool]:
    """Compares a configuration with the one that a run was started with.

    Args:
        old: text of the run's config.yaml.
        config: to go on with.
        latest: checkpoint of the run, if it has one.

    Returns:
        What keeps the run from going on, and whether anything differs at all.
    """
    before, now = yaml.safe_load(old), yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json", by_alias=True)))
    fix = "put it back, or start a new run in another run.dir"
    if _at(before, "stage") != config.stage:  # whatever else differs follows from it
        rule = f"stays {_at(before, 'stage')} when a run goes on: a run is of one stage"
        return [Problem(field="stage", value=config.stage, rule=rule, fix=fix)], True
    problems = [
        Problem(field=field, value=given, rule=f"stays {kept} when a run goes on: {why}", fix=fix)
        for name, why in FIXED.items()
        for field, kept, given in _differences(name, _at(before, name), _at(now, name))
    ]
    if latest is not None:
        problems += _unfit(config, latest)
    return problems, before != now


def _unfit(config: TrainingConfig, latest: Checkpoint) -> Iterator[Problem]:
    """How a configuration contradicts a checkpoint."""
    saved = sorted(config.saved)
    if saved != sorted(latest.roles):
        rule = f"{', '.join(sorted(latest.roles))} change, as in its latest checkpoint"
        fix = "place the same roles, or start a new run in another run.dir"
        yield Problem(field="groups", value=", ".join(saved), rule=rule, fix=fix)
    if config.run.steps < latest.step:
        rule = f"at least the {latest.step} steps that the run has taken"
        yield Problem(field="run.steps", value=str(config.run.steps), rule=rule, fix="raise it")


def _at(fields: Any, path: str) -> Any:
    """What a nested dict has at a dotted path."""
    for key in path.split("."):
        fields = cast(Mapping[str, Any], fields).get(key, _MISSING) if isinstance(fields, Mapping) else _MISSING
    return fields


def _differences(field: str, kept: Any, given: Any) -> Iterator[tuple[str, str, str]]:
    """The fields, from one on, whose values differ, with both; a section that only one side has is one of them."""
    if isinstance(kept, Mapping) and isinstance(given, Mapping):
        both: list[Mapping[str, Any]] = [kept, given]
        for key in sorted({key for fields in both for key in fields}):
            yield from _differences(f"{field}.{key}", *(fields.get(key, _MISSING) for fields in both))
    elif kept != given:
        yield field, shown(kept), shown(given)


def cut_lines(path: Path, last: int) -> None:
    """Shortens a file of JSON lines, in rising order of their ``step``, to the steps until ``last``.

    A line that is not whole is what a killed process was writing: it goes, with everything after it.
    """
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n") or _step(line) > last:
                break
            kept += len(line)
    os.truncate(path, kept)
    sync(path)


def _step(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, UnicodeDecodeError):
        return float("inf")
