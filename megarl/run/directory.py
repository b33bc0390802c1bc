"""The directory that a run writes: one process at a time, and the same run from its beginning to its end."""

from __future__ import annotations

import fcntl
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from megarl.cluster.driver_environment import ignore_interrupts, interrupts_raise
from megarl.config import ConfigError, EvalConfig, Problem, RunConfig, TrainingConfig, save
from megarl.config.schema import RandomModel
from megarl.errors import RunError
from megarl.files import read_lines, sync, write_durably
from megarl.run.attempts import AttemptLog, Reason
from megarl.run.checkpoints import BrokenCheckpointError, Checkpoint, Checkpoints
from megarl.run.resume import broken_promises, cut_lines

_CONFIG = "config.yaml"
_LOCK = ".lock"
_ANOTHER = "choose another run.dir"
_TRIES, _GLANCE_S = 3, 0.05
"""To have the lock: whoever asks for the status of a run takes it for an instant, to see whether it is free."""


class RunPaths:
    """Where everything of a run lies. Nothing else may write it: the object holds a lock until it is closed.

    Args:
        config: of the run.

    Raises:
        ConfigError: another process has the directory, or it cannot be written.
    """

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.run.dir)
        with _writing(config):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path / _LOCK, config)

    @property
    def finished(self) -> bool:
        """Whether the run has told its end: there is nothing left to do."""
        return self.summary.exists()

    def close(self) -> None:
        """Lets another process have the directory."""
        self._lock.close()

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / _CONFIG

    @property
    def _lines(self) -> tuple[Path, ...]:
        return self.metrics, self.updates, self.evaluations, self.samples

    @property
    def metrics(self) -> Path:
        """A line of JSON per step."""
        return self.path / "metrics.jsonl"

    @property
    def updates(self) -> Path:
        """A line of JSON per optimizer step."""
        return self.path / "updates.jsonl"

    @property
    def evaluations(self) -> Path:
        """A line of JSON per evaluation."""
        return self.path / "evaluations.jsonl"

    @property
    def samples(self) -> Path:
        """A line of JSON per sample that is kept for reading."""
        return self.path / "samples.jsonl"

    @property
    def attempts(self) -> Path:
        """A line of JSON for the start of each process that ran the run, and one for its end."""
        return self.path / "attempts.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's events."""
        return self.path / "tensorboard"

    @property
    def left_out(self) -> Path:
        """Rows of the data that the run leaves out."""
        return self.path / "left_out.jsonl"

    @property
    def summary(self) -> Path:
        """What a finished run was, as JSON: the last thing that a run writes."""
        return self.path / "summary.json"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face directory, when the run is finished."""
        return self.path / "export"

    @property
    def logs(self) -> Path:
        """What each process prints, a file per process."""
        return self.path / "logs"


class RunDirectory(RunPaths):
    """Where everything of a run lies; made anew, or brought to where its latest checkpoint was made.

    Nothing else may write it: the object holds a lock until it is closed or its process ends. A run that goes on loses
    what it had told of the steps after the checkpoint, and takes them again.

    Args:
        config: of the run.

    Raises:
        ConfigError: another process runs the run, its checkpoint is broken, it was started with another configuration,
            or the directory cannot be written.
    """

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(config)
        self.latest: Checkpoint | None = None
        """What the run goes on from; None where it begins."""
        self.checkpoints = Checkpoints(self.path / "checkpoints", keep=config.checkpoint.keep)
        with _writing(config):
            if self.config.exists():
                self._reopen(config)
            if not self.finished:
                save(config, self.config)

    def _reopen(self, config: TrainingConfig) -> None:
        self.checkpoints.clean()
        try:
            self.latest = self.checkpoints.latest()
        except BrokenCheckpointError as error:
            fix = f"restore its files, or remove {error.directory} to go on from what was before"
            raise _refused(config, f"{error}", fix) from None
        step = 0 if self.latest is None else self.latest.step
        old = self.config.read_text(encoding="utf-8")
        problems, changed = broken_promises(old, config, self.latest)
        if problems:
            raise ConfigError(problems)
        if self.finished and step == config.run.steps:
            return
        if self.finished and self.latest is None:  # to begin again would remove its export
            raise _refused(
                config, "has a checkpoint: the run is finished, and there is nothing to go on from", _ANOTHER
            )
        if changed:
            write_durably(self.path / f"config.until-step-{step}.yaml", old)
        self.summary.unlink(missing_ok=True)
        for export in (self.export, average_directory(self.export)):
            if export.exists():
                shutil.rmtree(export)
        for path in self._lines:
            cut_lines(path, step if self.latest is not None else -1)

    def sync(self) -> None:
        """Makes durable what the run has told so far: a checkpoint must not know of steps that the files have lost."""
        for path in self._lines:
            if path.exists():
                sync(path)

    def close(self) -> None:
        """Removes an unfinished checkpoint, and lets another process have the directory."""
        self.checkpoints.clean()
        super().close()


class EvaluationDirectory(RunPaths):
    """Where everything of an evaluation by itself lies; one that was interrupted begins again.

    Args:
        config: of the evaluation.

    Raises:
        ConfigError: another process has the directory, it has another run already, or it cannot be written.
    """

    def __init__(self, config: EvalConfig) -> None:
        super().__init__(config)
        with _writing(config):
            if self.config.exists() and (self.finished or not self._is_evaluation()):
                there = "a finished evaluation" if self._is_evaluation() else "a run of training"
                fix = f"{_ANOTHER}, or remove the directory"
                raise _refused(config, f"has nothing that would be lost; {there} is there", fix)
            for path in self._lines:
                path.unlink(missing_ok=True)
            shutil.rmtree(self.tensorboard, ignore_errors=True)
            save(config, self.config)

    def _is_evaluation(self) -> bool:
        """Whether an evaluation has written the configuration that is there."""
        return yaml.safe_load(self.config.read_text(encoding="utf-8")).get("stage") == "eval"


@contextmanager
def _writing(config: RunConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _refused(config, f"can be written ({error.strerror})", _ANOTHER) from None


def average_directory(export: Path) -> Path:
    """Where the average of the weights lies of an exported actor."""
    return export.with_name(f"{export.name}-ema")


def _locked(path: Path, config: RunConfig) -> Any:
    """The lock file, open; the lock goes when it is closed, at the latest by the end of the process."""
    lock = path.open("a")
    for _ in range(_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            time.sleep(_GLANCE_S)
        except OSError as error:
            lock.close()
            rule = f"on a file system with locks, flock(2) ({error.strerror})"
            raise _refused(
                config, rule, "choose another run.dir; Lustre has locks where it is mounted with flock"
            ) from None
    lock.close()
    raise _refused(config, "is run by one process at a time", f"wait for the other process, or {_ANOTHER}")


def _refused(config: RunConfig, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem(field="run.dir", value=config.run.dir, rule=rule, fix=fix)])


@contextmanager
def attempt(directory: RunPaths, taken: int = 0) -> Iterator[None]:
    """Lasts as long as this process has the run's directory. SIGTERM raises SystemExit meanwhile.

    Args:
        directory: of the run.
        taken: steps that were taken before.
    """
    log = AttemptLog(directory.attempts)
    with interrupts_raise():
        log.start(taken)
        try:
            yield
        except BaseException as error:
            ignore_interrupts()
            log.end(_step(directory, taken), *_told(error))
            raise
        ignore_interrupts()
        log.end(_step(directory, taken), "finished")


def _step(directory: RunPaths, taken: int) -> int:
    """The last step that the run has told of."""
    with suppress(OSError):  # it must not hide what ended the run
        for line in read_lines(directory.metrics, last=1):
            return line.get("step", taken)
    return taken


def _told(error: BaseException) -> tuple[Reason, str]:
    """What ended the run, and what its user reads of it."""
    match error:
        case KeyboardInterrupt():
            return "interrupted", signal.SIGINT.name
        case SystemExit():
            return "interrupted", signal.SIGTERM.name
        case ConfigError():
            return "config error", str(error)
        case RunError():
            return "run error", str(error)
        case _:
            return "exception", "".join(traceback.format_exception_only(error)).strip()


def model_directory(config: RunConfig, run_dir: Path) -> str:
    """Returns the Hugging Face directory of the run's model; a random model is written to ``run_dir/model`` first."""
    if config.model.random is None:
        assert config.model.path is not None
        return config.model.path
    directory = run_dir / "model"
    if not directory.exists():
        partial = run_dir / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        write_random_model(config.model.random, partial)
        partial.rename(directory)
    return str(directory.absolute())


def write_random_model(model: RandomModel, directory: Path) -> None:
    """Writes config.json and safetensors of a randomly initialised model, without a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    fields = dict(model.config)
    hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        AutoModelForCausalLM.from_config(hf_config, dtype=hf_config.dtype).save_pretrained(directory)
