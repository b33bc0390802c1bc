"""Sinks of metrics: files of JSON lines, TensorBoard, Weights & Biases, MLflow, Trackio; and the sink of samples."""

from __future__ import annotations

import json
import math
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Protocol, cast

from megarl.files import format_bytes, sync, write_errors

Metrics = Mapping[str, float]

WRITTEN: Final = "time/written"
"""The time of writing in each line, seconds since 1970."""
_FLUSH_S = 10
_AFTER_THINNING = 0.75
_AFTER_KIND = b', "sample_id"'


class Sink(Protocol):
    """A receiver of the metrics of each step."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics of a step; steps come in ascending order."""
        ...

    def close(self) -> None:
        """Writes what is pending and releases everything."""
        ...


class JsonlSink:
    """Appends a JSON object per call to a file, flushed: `step` first. Numbers that are not finite become null.

    Args:
        path: file, whose directory is created.
        clock: seconds since 1970, the last entry of each object; None leaves it out.
    """

    def __init__(self, path: Path, clock: Callable[[], float] | None = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        self._clock = clock

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        written = {} if self._clock is None else {WRITTEN: self._clock()}
        entries = as_json({"step": step, **metrics, **written})
        with write_errors(self._path):
            self._path.stat()  # what is written into a file that was removed would be lost
            self._file.write(json.dumps(entries, allow_nan=False, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        with write_errors(self._path):  # of what could not be flushed
            self._file.close()


def as_json(value: Any) -> Any:
    """Returns a value that JSON can express: numpy's numbers as plain ones, numbers that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(name): as_json(entry) for name, entry in value.items()}
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, Sequence):
        return [as_json(entry) for entry in value]
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else None


class SampleSink:
    """Appends samples to a file of JSON lines, and drops older steps when it becomes too large.

    Every other step of the older half is dropped, but not the first one: the rest covers the whole
    run. Training and evaluations are counted separately; steps of the larger one are dropped.

    Args:
        limit: size in bytes; the first and the last two steps of both kinds stay,
            whatever their size.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._warned = False
        self._lines = JsonlSink(path, clock=None)

    def write(self, step: int, kind: str, samples: Iterable[Mapping[str, Any]]) -> None:
        """Writes the samples of a step, or of the evaluation after it."""
        for sample in samples:
            self._lines.write(step, {"kind": kind, **sample})
        if self._path.stat().st_size > self._limit:
            self._thin()

    def close(self) -> None:
        self._lines.close()

    def _thin(self) -> None:
        sizes: dict[bytes, int] = {}
        with self._path.open("rb") as lines:
            for line in lines:
                step = _step_prefix(line)
                sizes[step] = sizes.get(step, 0) + len(line)
        kept = _thinned(sizes, int(_AFTER_THINNING * self._limit))
        if len(kept) == len(sizes):
            return
        partial = self._path.with_name(f".{self._path.name}.partial")
        with write_errors(partial), self._path.open("rb") as lines, partial.open("wb") as file:
            file.writelines(line for line in lines if _step_prefix(line) in kept)
        sync(partial)
        self._lines.close()
        partial.replace(self._path)
        self._lines = JsonlSink(self._path, clock=None)
        if not self._warned:
            limit = f"tracking.samples_mib ({format_bytes(self._limit)})"
            print(f"{self._path} has reached {limit}: from now on, older steps are dropped", flush=True)
            self._warned = True


def _step_prefix(line: bytes) -> bytes:
    """Returns the beginning of a sample's line, which names its step and kind."""
    return line.partition(_AFTER_KIND)[0]


def _thinned(sizes: Mapping[bytes, int], max_bytes: int) -> set[bytes]:
    """Returns the steps that stay in a file of samples; `sizes` are in the order of the file."""
    by_kind: dict[bytes, list[bytes]] = {}
    for step in sizes:
        by_kind.setdefault(step.rpartition(b" ")[2], []).append(step)
    kinds = list(by_kind.values())
    total = sum(sizes.values())
    while total > max_bytes:
        long_kinds = [steps for steps in kinds if len(steps) > 3]
        if not long_kinds:
            break
        largest = max(long_kinds, key=lambda steps: sum(sizes[step] for step in steps))
        total -= sum(sizes[step] for step in largest[1 : len(largest) // 2 : 2])
        del largest[1 : len(largest) // 2 : 2]
    return set().union(*kinds)


class TensorBoardSink:
    """Writes an event file into a directory, which is created, beside those of earlier attempts.

    The calling thread writes: `tensorboardX.SummaryWriter` (2.6) blocks for ever once its thread
    has met a full disk.

    Args:
        first_step: step from which on TensorBoard discards events of earlier files.
    """

    def __init__(self, directory: Path, *, first_step: int = 1) -> None:
        from tensorboardX.proto import event_pb2  # it imports torch
        from tensorboardX.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        # The usual name has the time in whole seconds; a run may resume within one.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.from-{first_step}"
        self._path = directory / name
        self._next_flush = 0.0
        self._file = RecordWriter(str(self._path))
        self._proto = cast(Any, event_pb2)
        self._add(file_version="brain.Event:2")
        start = self._proto.SessionLog.START
        self._add(step=first_step, session_log=self._proto.SessionLog(status=start))

    def write(self, step: int, metrics: Metrics) -> None:
        from tensorboardX.summary import scalar

        with write_errors(self._path):
            for name, value in metrics.items():
                self._add(step=step, summary=scalar(name, value))
            if time.monotonic() > self._next_flush:
                self._file.flush()
                self._next_flush = time.monotonic() + _FLUSH_S

    def close(self) -> None:
        with write_errors(self._path):
            self._file.close()

    def _add(self, **fields: Any) -> None:
        self._file.write(self._proto.Event(wall_time=time.time(), **fields).SerializeToString())


class ServiceSink:
    """Writes to a service, and prints what that raises: a run does not end with what shows it.

    Args:
        name: name of the service, in messages.
        write, close: functions like those of a sink.
    """

    def __init__(self, name: str, write: Callable[[int, Metrics], object], close: Callable[[], object]) -> None:
        self._name = name
        self._write = write
        self._close = close

    def write(self, step: int, metrics: Metrics) -> None:
        self._try(f"write step {step}", partial(self._write, step, metrics))

    def close(self) -> None:
        self._try("close", self._close)

    def _try(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            print(f"{self._name} cannot {what}: {error}", file=sys.stderr, flush=True)


def open_wandb(project: str, directory: Path, config: Mapping[str, Any]) -> ServiceSink:
    """Logs to a run of Weights & Biases, the same one after a resume.

    wandb starts a process, which ends when the sink is closed. Its environment variables
    apply: with `WANDB_MODE=offline` everything stays in the directory, which also has
    the id of its run.
    """
    import wandb

    run = wandb.init(
        project=project,
        name=directory.absolute().name,
        dir=str(directory),
        id=_kept(directory / "wandb_id", lambda: secrets.token_hex(4)),
        resume="allow",
        config=dict(config),
        settings=wandb.Settings(console="off", silent=True),
    )
    # wandb's own steps must not go back, as those of evaluations beside the training do, and of a resumed run.
    run.define_metric("*", step_metric="step")

    def close() -> None:
        run.finish()
        wandb.teardown()

    return ServiceSink("wandb", lambda step, metrics: run.log({**metrics, "step": step}), close)


def open_mlflow(experiment: str, directory: Path, config: Mapping[str, Any]) -> ServiceSink:
    """Logs to a run of an experiment of MLflow, the same one after a resume; its parameters are the configuration.

    MLflow's environment variables apply: `MLFLOW_TRACKING_URI` says where. The
    directory has the id of its run.
    """
    import mlflow  # pyright: ignore[reportMissingImports]

    mlflow.set_experiment(experiment)
    file = directory / "mlflow_id"
    resumes = file.exists()
    name = directory.absolute().name
    # A new run is created first: its id is kept before anything is logged.
    run_id = _kept(file, lambda: mlflow.start_run(run_name=name, log_system_metrics=False).info.run_id)
    if resumes:
        mlflow.start_run(run_id=run_id, log_system_metrics=False)
    else:
        mlflow.log_params(dict(flat(config)))
    return ServiceSink("mlflow", lambda step, metrics: mlflow.log_metrics(dict(metrics), step=step), mlflow.end_run)


def open_trackio(project: str, directory: Path, config: Mapping[str, Any]) -> ServiceSink:
    """Logs to a run of a project of Trackio, the same one after a resume.

    Trackio's environment variables apply: `TRACKIO_DIR` says where. The directory has
    the name of its run.
    """
    import trackio  # pyright: ignore[reportMissingImports]

    # Trackio resumes by the name: a run of another directory may be called the same.
    name = _kept(directory / "trackio_name", lambda: f"{directory.absolute().name}-{secrets.token_hex(4)}")
    run = trackio.init(project=project, name=name, config=dict(config), resume="allow", embed=False, auto_log_gpu=False)
    return ServiceSink("trackio", lambda step, metrics: run.log(dict(metrics), step=step), run.finish)


def _kept(file: Path, make: Callable[[], str]) -> str:
    """Returns the text of a file, which is made if it is missing."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def flat(fields: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of a configuration with their paths, such as `algo.kl.coef`."""
    if isinstance(fields, Mapping) and fields:
        for name, value in fields.items():
            yield from flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, fields
