"""A checkpoint is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import CheckpointSettings
from megarl.errors import RunError
from megarl.run.checkpoints import BrokenCheckpointError, Checkpoints
from megarl.run.directory import steps_to_keep
from tests.disk import SmallDisk
from tests.run.staging import content, write_role, write_roles

STATE = {"version": 3, "stream": {"position": 7, "epoch": 1}, "kl": {"coef": 0.1 + 0.2}}


def save(checkpoints: Checkpoints, step: int, seed: int = 0, **options: Any) -> None:
    checkpoints.commit(step, write_roles(checkpoints.stage(step), seed=seed), {**STATE, "step": step}, **options)


def latest_step(checkpoints: Checkpoints) -> int:
    latest = checkpoints.latest()
    assert latest is not None
    return latest.step


def test_the_latest_checkpoint_has_what_was_committed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    for step in (1, 9, 10):  # as text, 10 sorts before 9
        save(checkpoints, step, seed=step, kept=lambda steps: steps[-2:])
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-10", "step-9"], "others are removed"
    assert checkpoints.steps() == [9, 10]
    latest = Checkpoints(tmp_path / "checkpoints").latest()
    assert latest is not None
    assert (latest.step, latest.roles) == (10, ("actor", "critic"))
    assert latest.state == {**STATE, "step": 10}
    other = tmp_path / "other"
    write_roles(other, seed=10)
    files = content(latest.path)
    assert {name: data for name, data in files.items() if "/" in name} == content(other)
    manifest = json.loads(files["manifest.json"])
    for role in ("actor", "critic"):
        for rank in (0, 1):
            for record in manifest["roles"][role][rank]:
                data = files[f"{role}/{record['path']}"]
                assert (record["nbytes"], record["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
                assert record["path"].startswith(f"{rank}-")


VALUES = {0: 9.0, 10: 0.25, 20: 0.75, 30: None, 40: 0.75, 50: 0.5}


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({}, {50, 60}),
        ({"keep_every": 30}, {30, 50, 60}),
        ({"best": {"metric": "eval/score", "mode": "max"}}, {20, 50, 60}),
        ({"best": {"metric": "eval/score", "mode": "min"}}, {10, 50, 60}),
        ({"keep": 1, "best": {"metric": "eval/other", "mode": "max"}}, {60}),
    ],
)
def test_checkpoints_stay_for_a_reason(tmp_path: Path, more: dict[str, Any], kept: set[int]) -> None:
    """Of equal values the first is the best; what has no checkpoint, no evaluation, or no number, cannot be."""
    lines = tmp_path / "evaluations.jsonl"
    lines.write_text("".join(json.dumps({"step": s, "eval/score": v}) + "\n" for s, v in VALUES.items()))
    settings = CheckpointSettings.model_validate({"keep": 2, **more})
    assert steps_to_keep(settings, lines, [10, 20, 30, 40, 50, 60]) == kept


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda d: flip(d / "actor/1-0.bin"), "actor/1-0.bin of actor rank 1 has other content"),
    "truncated": (
        lambda d: os.truncate(d / "critic/0-1.bin", 999),
        "critic/0-1.bin of critic rank 0 has 999 bytes, not 1000",
    ),
    "missing": (lambda d: (d / "actor/0-0.bin").unlink(), "actor/0-0.bin of actor rank 0 cannot be read: No such file"),
    "stray": (lambda d: (d / "critic/left.bin").write_bytes(b"x"), "critic/left.bin is not in the manifest"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_neither_committed_nor_resumed(tmp_path: Path, damage: str) -> None:
    """An older one is not used silently either: the user decides."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    before = content(tmp_path / "step-1")
    spoil, message = DAMAGES[damage]
    staged = checkpoints.stage(2)
    records = write_roles(staged)
    spoil(staged)
    with pytest.raises(BrokenCheckpointError, match=message):
        checkpoints.commit(2, records, STATE)
    assert latest_step(checkpoints) == 1
    assert content(tmp_path / "step-1") == before
    save(checkpoints, 2)
    spoil(tmp_path / "step-2")
    with pytest.raises(BrokenCheckpointError, match=message):
        checkpoints.latest()


def test_all_problems_are_reported(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    flip(tmp_path / "step-1/actor/0-0.bin")
    (tmp_path / "step-1/critic/1-1.bin").unlink()
    (tmp_path / "step-1/state.json").write_text("{}")
    with pytest.raises(BrokenCheckpointError) as caught:
        checkpoints.latest()
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        "state.json",
        "actor/0-0.bin",
        "critic/1-1.bin",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "manifest.json cannot be read: .*No such file"),
        ("{", "manifest.json cannot be read: "),
        ("[]", "manifest.json cannot be read: "),
        ('{"format": 1, "step": 1}', "manifest.json cannot be read: 'roles'"),
        ('{"format": 2}', "manifest.json has format 2, not 1"),
    ],
)
def test_an_unreadable_manifest_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    manifest = tmp_path / "step-1/manifest.json"
    manifest.unlink()
    if text is not None:
        manifest.write_text(text)
    with pytest.raises(BrokenCheckpointError, match=message):
        checkpoints.latest()


def test_what_was_not_committed_is_discarded_when_it_is_staged_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    records = write_role(checkpoints.stage(1) / "actor", 3)
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpoints.commit(1, {"actor": records}, {"coef": float("nan")})
    assert checkpoints.latest() is None
    save(checkpoints, 1)
    assert latest_step(checkpoints) == 1


@pytest.mark.process
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "disk", 400) as disk:
        checkpoints = Checkpoints(disk.path / "checkpoints")
        save(checkpoints, 1)
        records = write_roles(checkpoints.stage(2))
        disk.fill(0)
        said = r"step 2 cannot be written: .*step-2.staged/.state.json.partial: No space left on device \(.* 0 B free"
        with pytest.raises(RunError, match=said):
            checkpoints.commit(2, records, STATE)
        checkpoints.clean()
        assert latest_step(checkpoints) == 1


def _killed_at(call: int, directory: Path) -> None:
    """Commits step 2, and kills itself before the file system's n-th change."""
    changes = 0

    def counting(function: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            nonlocal changes
            changes += 1
            if changes == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
        setattr(os, name, counting(getattr(os, name)))
    save(Checkpoints(directory), 2, seed=2)
    os._exit(0)


@pytest.mark.process
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """The next run finds the old or the new one, cleans up, and can resume."""
    context = multiprocessing.get_context("fork")
    outcomes: list[int] = []
    for call in range(1, 200):
        directory = tmp_path / f"kill-{call}"
        save(Checkpoints(directory), 1, seed=1)
        process = context.Process(target=_killed_at, args=(call, directory))
        process.start()
        process.join()
        checkpoints = Checkpoints(directory)
        checkpoints.clean()
        latest = checkpoints.latest()
        assert latest is not None, f"killed at change {call}"
        assert {name.split("-")[0] for name in os.listdir(directory)} == {"step"}
        other = tmp_path / f"expected-{call}"
        write_roles(other, seed=latest.step)
        assert {n: d for n, d in content(latest.path).items() if "/" in n} == content(other)
        outcomes.append(latest.step)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        save(checkpoints, 3)
        assert checkpoints.steps() == [3]
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}
    assert len(outcomes) > 15, "hardly anything was counted"
