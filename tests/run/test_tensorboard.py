"""TensorBoard events, read back as the file format says."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from megarl.run.sinks import TensorBoardSink
from tests.disk import SmallDisk


def records(path: Path) -> Iterator[bytes]:
    """The records of a TFRecord file: length (8 bytes), its checksum (4), data, its checksum (4)."""
    data = path.read_bytes()
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + length]
        at += 12 + length + 4


def events(directory: Path) -> list[list[Any]]:
    """The events of each file, in the order of the steps that they begin with."""
    files = sorted(directory.iterdir(), key=lambda file: int(file.name.rpartition(".from-")[2]))
    return [[Event.FromString(record) for record in records(file)] for file in files]


def scalars(file: list[Any]) -> list[tuple[int, str, float]]:
    return [(event.step, value.tag, value.simple_value) for event in file for value in event.summary.value]


def test_every_metric_is_an_event_and_no_thread_is_left(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.write(1, {"objective/kl": 0.5, "rollout/samples": 16})
    sink.write(2, {"objective/kl": math.nan})
    sink.close()
    (file,) = events(tmp_path / "tensorboard")
    first, second, third = scalars(file)
    assert (first, second) == ((1, "objective/kl", 0.5), (1, "rollout/samples", 16.0))
    assert third[:2] == (2, "objective/kl")
    assert math.isnan(third[2])
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=60)  # the writer has ended its queue, whose thread sees that in its own time
        assert not thread.is_alive()


def test_a_resumed_run_has_a_new_file_that_purges_steps_after_the_checkpoint(tmp_path: Path) -> None:
    for first in (1, 3):
        sink = TensorBoardSink(tmp_path, first_step=first)
        sink.write(first, {"loss": float(first)})
        sink.close()
    before, after = events(tmp_path)
    assert scalars(before) == [(1, "loss", 1.0)]
    assert scalars(after) == [(3, "loss", 3.0)]
    starts = [event.step for event in after if event.session_log.status == SessionLog.START]
    assert starts == [3], "TensorBoard drops earlier events from this step on"


@pytest.mark.process
def test_a_full_disk_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "disk", 64) as disk:
        sink = TensorBoardSink(disk.path / "tensorboard")
        disk.fill(0)
        for end in (lambda: sink.write(1, {f"metric/{number}": 0.5 for number in range(500)}), sink.close):
            with pytest.raises(OSError, match=r"No space left on device \(0 B free\): '.*events.out.tfevents"):
                end()
