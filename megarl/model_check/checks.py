"""The checks of a model, one after the other; most of them check a small copy of it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Final, Literal

from megarl.convert.exporting import compare
from megarl.convert.importing import import_checkpoint
from megarl.convert.megatron_checkpoint import require_megatron_format
from megarl.errors import RunError, UsageError
from megarl.loop.logprob_check import TOLERANCES as AGREEMENT
from megarl.model_check.runs import fine_tune, roll_out
from megarl.model_check.small_models import VOCABULARY, small_config, write_small_model
from megarl.model_check.training_oracle import Step, Texts, differences, transformers_step
from megarl.models import ModelSpec, model_spec
from megarl.rollout import loader_map
from megarl.rollout.vllm_environment import vllm_device
from megarl.types import Layout
from megarl.weights.hf_files import HFDirectory, has_weights, read_config

Status = Literal["passed", "failed", "skipped"]

TOLERANCES: Final[Mapping[str, float]] = {
    "loss": 1e-5,
    "gradient": 1e-4,
    "weights": 0.01,
    "next loss": 1e-5,
}
"""Largest differences of float32 from float64, by the names in ``differences``."""
OTHER_EXPERTS: Final = 0.3
"""Largest difference in bfloat16 where no experts are replayed: some tokens go to other ones."""
LAYOUTS: Final[Mapping[str, Layout]] = {
    "one rank": Layout(),
    "TP 2 x PP 2": Layout(tp=2, pp=2, sequence_parallel=True),
    "EP 2": Layout(dp=2, ep=2),
}

_LOADER_S = 300
_BEFORE = "before training"
_NEEDS_CPU_BUILD = "needs vLLM's build for CPUs, which this environment lacks"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of a check.

    Args:
        numbers: differences, by what differs.
        dtype: dtype of the run, where it is not the same for all models.
    """

    check: str
    status: Status
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    dtype: str | None = None


def check_model(directory: Path, workspace: Path) -> Iterator[CheckResult]:
    """Yields the finding of each check as it ends.

    Without a supported config or a small model there are no further ones.

    Args:
        directory: Hugging Face directory; of the files config.json is enough.
        workspace: empty directory for the small model, its runs and the tracebacks of errors.
    """
    run = partial(_run, workspace)
    config = run("config", partial(_config, directory))
    yield config
    if config.status == "failed":
        return
    spec = model_spec(read_config(directory))
    yield run("files", partial(_files, directory, spec))
    model = workspace / "model"
    written = run("small model", partial(_small_model, spec, model))
    yield written
    if written.status == "failed":
        return
    yield run("engine loader", partial(_engine_loader, model))
    yield from _training(model, workspace)
    yield run("conversion", partial(_conversion, model, workspace / "megatron"))
    yield run("rollouts", partial(_rollouts, small_config(spec.config), workspace))


def _run(workspace: Path, check: str, call: Callable[[str], CheckResult]) -> CheckResult:
    """Calls a check with its name; of an error, whatever it is, the traceback is kept."""
    try:
        return call(check)
    except RunError as error:
        return CheckResult(check=check, status="failed", detail=str(error))
    except Exception as error:  # a wrong family lets transformers and vLLM raise anything
        return _unexpected(workspace, check, error)


def _unexpected(workspace: Path, check: str, error: Exception) -> CheckResult:
    file = workspace / f"{check.replace(' ', '_')}.txt"
    file.write_text("".join(traceback.format_exception(error)))
    detail = f"{type(error).__name__}: {error} (with --keep DIR its traceback is in DIR/{file.name})"
    return CheckResult(check=check, status="failed", detail=detail)


def _compared(
    check: str,
    what: str,
    numbers: Mapping[str, float],
    limits: Mapping[str, float],
    dtype: str | None = None,
) -> CheckResult:
    """The finding of differences that have limits."""
    detail = f"{what}: " + ", ".join(f"{name} {value:.1e}" for name, value in numbers.items())
    status: Status = "passed"
    for name, value in numbers.items():
        if not value <= limits[name]:
            status = "failed"
            detail += f"; {name} is above {limits[name]:.0e}"
    return CheckResult(check=check, status=status, detail=detail, numbers=numbers, dtype=dtype)


def _config(directory: Path, check: str) -> CheckResult:
    """Whether the model is supported."""
    spec = model_spec(read_config(directory))
    detail = f"{spec.family.lm_class}; layers: {spec.dims.layers}, kinds: {len(spec.table.kinds)}"
    if spec.head != "lm":
        detail += "; the small copy has the head of a language model"
    return CheckResult(check=check, status="passed", detail=detail)


def _files(directory: Path, spec: ModelSpec, check: str) -> CheckResult:
    """Whether the weights have the names and shapes of the maps."""
    if not has_weights(directory):
        return CheckResult(check=check, status="skipped", detail="the directory has no weights")
    HFDirectory(directory).check(spec.manifest(spec.head))
    return CheckResult(check=check, status="passed", detail="the tensors of the maps, by name and shape")


def _small_model(spec: ModelSpec, directory: Path, check: str) -> CheckResult:
    """Whether transformers writes a small copy with the names and shapes of the maps."""
    config = small_config(spec.config)
    write_small_model(config, directory)
    small = model_spec(config)
    HFDirectory(directory).check(small.manifest())
    sizes = f"layers: {small.dims.layers}, channels: {small.dims.hidden}"
    detail = f"{sizes}; transformers' files have the tensors of the maps"
    return CheckResult(check=check, status="passed", detail=detail)


def _engine_loader(model: Path, check: str) -> CheckResult:
    """Compares what vLLM's own loader copies with the maps of TP 1 and 2, in another process."""
    if vllm_device() != "cpu":
        return CheckResult(check=check, status="skipped", detail=_NEEDS_CPU_BUILD)
    command = [sys.executable, "-m", loader_map.__name__, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LOADER_S)
    if done.returncode:
        raise RunError(f"vLLM's loader failed:\n{done.stderr[-2000:]}")
    difference = json.loads(done.stdout.splitlines()[-1])
    if difference is not None:
        return CheckResult(check=check, status="failed", detail=difference)
    detail = "vLLM's own copies what the maps say, on all ranks of TP 1 and 2"
    return CheckResult(check=check, status="passed", detail=detail)


def _training(model: Path, workspace: Path) -> Iterator[CheckResult]:
    """Compares a step of fine-tuning in each layout with that of transformers."""
    spec = model_spec(read_config(model))
    texts = _texts()
    try:
        expected = transformers_step(model, workspace / "transformers", spec, texts)
    except Exception as error:  # see _run
        yield _unexpected(workspace, "transformers", error)
        return
    detail = f"a step of fine-tuning in float64; loss {expected.before:.3f} nats"
    yield CheckResult(check="transformers", status="passed", detail=detail)
    for name, layout in LAYOUTS.items():
        if layout.ep == 1 or (spec.dims.experts and spec.dims.experts % layout.ep == 0):
            place = workspace / name.replace(" ", "_")
            step = partial(_step, model, place, texts, layout, expected)
            yield _run(workspace, f"training, {name}", step)


def _texts() -> Texts:
    """Prompts and responses of random ids, one of them longer than a chunk of a delta net."""
    choose = random.Random(0)
    texts: list[tuple[list[int], list[int]]] = []
    for length in (80, 2, 5, 9, 14, 20, 26, 31):
        prompt = [choose.randrange(1, VOCABULARY) for _ in range(choose.randrange(1, 12))]
        response = [choose.randrange(1, VOCABULARY) for _ in range(length)]
        texts.append((prompt, response))
    return texts


def _step(
    model: Path,
    directory: Path,
    texts: Texts,
    layout: Layout,
    expected: Step,
    check: str,
) -> CheckResult:
    """Compares the step of a run with another one."""
    found = differences(fine_tune(model, directory, texts, layout), expected)
    return _compared(check, "a step against transformers'", found, TOLERANCES)


def _conversion(model: Path, checkpoint: Path, check: str) -> CheckResult:
    """Compares the files with a Megatron checkpoint that is made of them."""
    try:
        require_megatron_format(model_spec(read_config(model)))
    except UsageError as error:
        return CheckResult(check=check, status="skipped", detail=str(error))
    with redirect_stderr(StringIO()):  # its progress
        import_checkpoint(model, checkpoint)
    count, different = compare(model, checkpoint)
    if different:
        what = f"{len(different)} of {count} tensors differ after a conversion:"
        return CheckResult(check=check, status="failed", detail="\n".join([what, *different]))
    detail = f"{count} tensors to a Megatron checkpoint and back, bit for bit"
    return CheckResult(check=check, status="passed", detail=detail)


def _rollouts(config: Mapping[str, Any], workspace: Path, check: str) -> CheckResult:
    """Compares log-probabilities of an engine with the trainer's, before training and in it."""
    if vllm_device() != "cpu":
        return CheckResult(check=check, status="skipped", detail=_NEEDS_CPU_BUILD)
    spec = model_spec(config)
    dtype = "float32"
    model = workspace / "model"
    if spec.table.delta_nets:
        dtype = "bfloat16"  # vLLM's kernels for these on a CPU take nothing else
        model = workspace / "model_bfloat16"
        write_small_model(model_spec(config, dtype=dtype).hf_config(), model)
    found = roll_out(model, workspace / "rollouts")
    numbers = {_BEFORE: found.loaded}
    for step, value in enumerate(found.sampled, start=1):
        numbers[f"step {step}"] = value
    limits = dict.fromkeys(numbers, AGREEMENT[dtype])
    if dtype == "bfloat16" and spec.dims.experts:
        limits[_BEFORE] = OTHER_EXPERTS
    if not all(norm > 0 for norm in found.grad_norms):
        raise RunError(f"a step of GRPO has no gradient: norms {found.grad_norms}")
    what = f"GRPO in {dtype}, trainer to engine, nats"
    return _compared(check, what, numbers, limits, dtype)
