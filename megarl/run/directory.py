"""The directory of a run, which one process at a time writes."""

from __future__ import annotations

import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from megarl.cluster.driver_environment import ignore_interrupts, interrupts_raise
from megarl.config import ConfigError, RunConfig, TrainingConfig, save
from megarl.config.schema import CheckpointSettings, RandomModel
from megarl.errors import PreemptedError, RunError
from megarl.files import FileRecord, full_disk, read_lines, sync, truncate_lines, write_durably, write_errors
from megarl.lazy_compiling import distributions_by_records
from megarl.run.attempts import AttemptLog, EndReason
from megarl.run.checkpoints import Checkpoint, Checkpoints, writing
from megarl.run.frozen_weights import FROZEN, digest_frozen_weights
from megarl.run.paths import RunPaths, acquire_lock, ema_export
from megarl.run.resume import (
    CHOOSE_ANOTHER,
    ResumePoint,
    find_resume_point,
    locked_error,
    refuse_other_runs,
    run_dir_error,
)
from megarl.run.timers import process_age
from megarl.weights.peft_files import adapter_export


class RunDirectory(RunPaths):
    """The directory of a training run, created, or reset to its latest checkpoint.

    It is locked until it is closed or its process ends. A resumed run loses what it wrote about the
    steps after the checkpoint, and takes these steps again.

    Raises:
        ConfigError: another process has the directory, the checkpoint is damaged, the configuration
            or frozen weights do not fit it, or the directory cannot be written.
    """

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(config.run.dir)
        self._keeping = config.checkpoint
        self.checkpoints = Checkpoints(self.checkpoint_dir)
        self.latest: Checkpoint | None = None
        """The checkpoint that the run resumes from; None when it starts from the beginning."""
        self._frozen = digest_frozen_weights(config)
        with _locked(self, config) as self._lock:
            self.checkpoints.clean()
            point = find_resume_point(config, self, self.checkpoints, self._frozen)
            if point is not None:
                self.latest = point.latest
                if not point.finished:
                    self._reset(point)
            if not self.finished:
                save(config, self.config, secrets=False)

    @property
    def step(self) -> int:
        """The step of the checkpoint; 0 without one."""
        return 0 if self.latest is None else self.latest.step

    def _reset(self, point: ResumePoint) -> None:
        if point.changed:
            old = self.config.read_text(encoding="utf-8")
            write_durably(self.path / f"config.until-step-{self.step}.yaml", old)
        self.summary.unlink(missing_ok=True)
        for model in (self.export, ema_export(self.export)):
            for export in (model, adapter_export(model)):
                if export.exists():
                    shutil.rmtree(export)
        last = -1 if self.latest is None else self.step
        for path in self.line_files:
            truncate_lines(path, lambda line: line["step"] <= last)

    def commit(self, step: int, files: Mapping[str, Sequence[Sequence[FileRecord]]], state: Mapping[str, Any]) -> None:
        """Commits the checkpoint of a step, after the lines of all steps up to it; see `Checkpoints.commit`."""
        for path in self.line_files:
            if path.exists():
                sync(path)
        if self._frozen:
            state = {**state, FROZEN: self._frozen}
        self.checkpoints.commit(step, files, state, partial(steps_to_keep, self._keeping, self.evaluations))

    def close(self) -> None:
        """Removes an unfinished checkpoint and releases the lock."""
        self.checkpoints.clean()
        self._lock.close()


class EvaluationDirectory(RunPaths):
    """The directory of a standalone evaluation, locked until it is closed. An interrupted evaluation starts again.

    Raises:
        ConfigError: another process has the directory, it has another run, or it cannot be written.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config.run.dir)
        with _locked(self, config) as self._lock:
            refuse_other_runs(config, self)
            for path in self.line_files:
                path.unlink(missing_ok=True)
            shutil.rmtree(self.tensorboard, ignore_errors=True)
            save(config, self.config, secrets=False)

    def close(self) -> None:
        self._lock.close()


def steps_to_keep(settings: CheckpointSettings, evaluations: Path, steps: Sequence[int]) -> set[int]:
    """Returns those of the steps with a checkpoint, in order, whose checkpoints stay."""
    kept = set(steps[-settings.keep :])
    if settings.keep_every is not None:
        kept.update(step for step in steps if step % settings.keep_every == 0)
    if settings.best is not None:
        values: dict[int, float] = {}
        for line in read_lines(evaluations):
            if line["step"] in steps and line.get(settings.best.metric) is not None:
                values[line["step"]] = line[settings.best.metric]
        if values:
            choose = max if settings.best.mode == "max" else min
            kept.add(choose(sorted(values), key=lambda step: values[step]))  # the first of equals
    return kept


@contextmanager
def _locked(paths: RunPaths, config: RunConfig) -> Iterator[IO[str]]:
    """Makes the directory and yields its lock, which only an error in the block releases."""
    try:
        paths.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            lock = opened.enter_context(paths.lock.open("a"))
            try:
                acquire_lock(lock)
            except BlockingIOError:
                raise locked_error(config) from None
            except OSError as error:
                rule = f"on a file system with locks, flock(2) ({error.strerror})"
                fix = f"{CHOOSE_ANOTHER}; Lustre has locks when mounted with flock"
                raise run_dir_error(config, rule, fix) from None
            yield lock
            opened.pop_all()
    except OSError as error:
        raise run_dir_error(config, f"can be written ({error.strerror})", CHOOSE_ANOTHER) from None


@contextmanager
def attempt(
    paths: RunPaths, taken: int = 0, reason: EndReason = "finished", clock: Callable[[], float] = process_age
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Records an attempt at the run in attempts.jsonl.

    Inside the block, SIGTERM raises SystemExit; a full disk, and an error of the run's own files,
    become a RunError. Yields a function that returns a context: an interrupt that leaves it is
    recorded at once. It stands inside the session, as a second SIGTERM kills a driver whose Ray
    shuts down (see `ray_api.shutdown`).

    Args:
        taken: steps that earlier attempts have taken.
        reason: reason of an end without an error.
        clock: seconds of the attempt.
    """
    log = AttemptLog(paths.attempts)
    recorded = False

    def record_end(reason: EndReason, message: str = "") -> None:
        nonlocal recorded
        ignore_interrupts()
        if not recorded:
            recorded = True
            log.end(last_step(paths, taken), reason, message)

    @contextmanager
    def recorded_if(*kinds: type[BaseException]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            record_end(*_end_reason(error))
            raise

    with interrupts_raise():
        log.start(taken, clock())
        with recorded_if(BaseException), _file_errors(paths):
            yield partial(recorded_if, KeyboardInterrupt, SystemExit, PreemptedError)
        record_end(reason)


@contextmanager
def _file_errors(paths: RunPaths) -> Iterator[None]:
    """Raises RunError for a write of the driver that finds no space, and for files of the run that others removed."""
    try:
        yield
    except OSError as error:
        message = full_disk(error)
        if message is None and isinstance(error.filename, str | Path) and paths.path in Path(error.filename).parents:
            rule = f"only the run may change what is in {paths.path} while it runs"
            message = f"{error.filename}: {error.strerror}; {rule}. Start it again"
        if message is None:
            raise
        raise RunError(message) from error


def last_step(paths: RunPaths, taken: int) -> int:
    """Returns the last step in metrics.jsonl; without one, those that earlier attempts have taken."""
    with suppress(OSError):  # it must not hide what ended the run
        for line in read_lines(paths.metrics, last=1):
            return line.get("step", taken)
    return taken


def _end_reason(error: BaseException) -> tuple[EndReason, str]:
    """Returns why the run ended, and the message for its user."""
    match error:
        case KeyboardInterrupt():
            return "interrupted", signal.SIGINT.name
        case SystemExit():
            return "interrupted", signal.SIGTERM.name
        case PreemptedError():
            return "preempted", str(error)
        case ConfigError():
            return "config error", str(error)
        case RunError():
            return "run error", str(error)
        case _:
            return "exception", "".join(traceback.format_exception_only(error)).strip()


def model_directory(config: RunConfig, run_dir: Path) -> str:
    """Returns the Hugging Face directory of the run's model; a random model is written to `run_dir/model` first.

    Raises:
        RunError: the random model cannot be written.
    """
    if config.model.random is None:
        assert config.model.path is not None
        return config.model.path
    directory = run_dir / "model"
    if not directory.exists():
        partial = run_dir / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        with writing("random model", partial), write_errors(partial):
            write_random_model(config.model.random, partial)
        partial.rename(directory)
    return str(directory.absolute())


def write_random_model(model: RandomModel, directory: Path) -> None:
    """Writes config.json and safetensors of a randomly initialized model, without a tokenizer."""
    import torch

    with distributions_by_records():
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

    logging.disable_progress_bar()
    fields = dict(model.config)
    hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        AutoModelForCausalLM.from_config(hf_config, dtype=hf_config.dtype).save_pretrained(directory)
