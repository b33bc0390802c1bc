"""The trace of a run, trace.json: what each process does and when, for Perfetto and chrome://tracing.

An array in the Trace Event Format, an event a line. An attempt at the run is a process there, and
the driver and every process of the run are its threads. Where the driver was killed the closing
bracket is missing, which the viewers allow.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from megarl.cluster.spans import WAIT, Span
from megarl.files import write_errors
from megarl.run.attempts import Attempt

_DRIVER = "driver"
_MIN_PHASE_S = 1e-4
_LIMIT_BYTES = 64 << 20
_TAIL_BYTES = 1 << 16
_COUNTERS = ("rollout/queue_depth", "rollout/engine_idle", "staleness/mean")
"""Metrics that are also in the trace."""


class Trace:
    """Appends to the trace of earlier attempts. When the file is full it becomes `trace.1.json`, in place of the last.

    Args:
        attempts: all attempts at the run; the last one is that of this process.
        limit: size of a full file in bytes; the step that fills it is written to the end.
    """

    def __init__(self, path: Path, attempts: Sequence[Attempt], limit: int = _LIMIT_BYTES) -> None:
        self._path = path
        self._limit = limit
        self._attempt = max(1, len(attempts))
        self._origin = attempts[0].time if attempts else time.time()
        self._rows = {_DRIVER: 0}
        self._step = 0
        self._step_start = 0.0
        _reopen(path)
        self._open()
        self._phase = "start"
        self._phase_start = time.time()

    def _open(self) -> None:
        self._file = self._path.open("a", encoding="ascii")
        self._bytes = self._path.stat().st_size
        self._event("M", name="process_name", args={"name": f"attempt {self._attempt}"})
        for name, row in self._rows.items():
            self._name(name, row)

    def ran(self, process: str, group: str, spans: Sequence[Span]) -> None:
        """Adds what a process of the run has done for a group or a role."""
        if process not in self._rows:
            self._rows[process] = len(self._rows)
            self._name(process, self._rows[process])
        row = self._rows[process]
        for span in spans:
            name = span.name if span.name == WAIT else f"{group}.{span.name}"
            self._complete(row, name, span.start, span.end)

    def phase(self, name: str) -> None:
        """Ends the driver's phase, and begins the next one."""
        now = time.time()
        if now - self._phase_start > _MIN_PHASE_S:
            self._complete(0, self._phase, self._phase_start, now)
        self._phase = name
        self._phase_start = now
        with write_errors(self._path):
            self._file.flush()

    def begin(self, step: int) -> None:
        self.phase("step")
        self._step = step
        self._step_start = self._phase_start

    def end(self, metrics: Mapping[str, float]) -> None:
        self.phase("report")
        now = self._phase_start
        self._complete(0, f"step {self._step}", self._step_start, now)
        for name in _COUNTERS:
            if name in metrics:
                self._event("C", name=name, ts=self._microseconds(now), args={"value": metrics[name]})
        if self._bytes > self._limit:
            self._finish()
            self._path.replace(self._path.with_suffix(".1.json"))
            self._open()

    def close(self) -> None:
        """Ends the phase and the file."""
        with write_errors(self._path), closing(self._file):
            self.phase("")
            self._finish()

    def _finish(self) -> None:
        self._file.write("]\n")
        self._file.close()

    def _name(self, process: str, row: int) -> None:
        self._event("M", tid=row, name="thread_name", args={"name": process})
        self._event("M", tid=row, name="thread_sort_index", args={"sort_index": row})

    def _complete(self, row: int, name: str, start: float, end: float) -> None:
        began = self._microseconds(start)
        duration = round(self._microseconds(end) - began, 1)
        self._event("X", tid=row, name=name, ts=began, dur=duration, args={"step": self._step})

    def _microseconds(self, when: float) -> float:
        """Returns a time since 1970 as one since the start of the first attempt."""
        return round(1e6 * (when - self._origin), 1)

    def _event(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"ph": kind, "pid": self._attempt, **fields}, separators=(",", ":"))
        text = f"{',' if self._bytes else '['}{line}\n"
        self._file.write(text)
        self._bytes += len(text)


def _reopen(path: Path) -> None:
    """Cuts the closing bracket, or an incomplete line, from the file of an earlier attempt."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        tail = file.read()
        complete = tail[: tail.rfind(b"\n") + 1].removesuffix(b"]\n")
        file.truncate(start + len(complete))
