"""From a checkpoint, Megatron-LM's or a run's, to a Hugging Face directory; and comparisons of the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.config import ConfigError, load
from megarl.config.schema import LoRA
from megarl.convert.megatron_checkpoint import HF_FILES, FoundCheckpoint, find_checkpoint, open_checkpoint
from megarl.convert.output import OutputFile, PartialOutput
from megarl.convert.resources import DEFAULT, Resources, run_tasks
from megarl.convert.stored import Assembly, Sources, Stored, copy_values, open_hf, open_untrained, read_spec
from megarl.errors import UsageError
from megarl.models import ModelSpec, model_spec
from megarl.models.lora import adaptable
from megarl.role_specs import adapters_of
from megarl.run.paths import field_at, read_config
from megarl.types import RoleName
from megarl.weights.export import (
    CONFIG_FILE,
    MAX_FILE_BYTES,
    SafetensorsFile,
    copy_side_files,
    group_tensors,
    lay_out,
    write_index,
    write_json,
)
from megarl.weights.hf_files import has_weights
from megarl.weights.peft_files import ADAPTER_CONFIG, ADAPTER_FILE, PEFT_PREFIX, adapter_config
from megarl.weights.shard_map import TensorInfo

_GROUP_BYTES = 256 << 20


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    resources: Resources = DEFAULT,
    template: Path | None = None,
    role: RoleName | None = None,
    step: int | None = None,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a Hugging Face directory with the weights of a checkpoint; continues an interrupted export.

    Of a run with adapters, these are written, in PEFT's format; see ``merging``.

    Args:
        checkpoint, role, step: see ``find_checkpoint``.
        template: HF directory of the model, with its tokenizer, where the checkpoint names none.
        max_file_bytes: size that no file of several tensors exceeds.
    """
    found = find_checkpoint(checkpoint, role=role, step=step)
    spec, origin, side_directories = _model_of(found, template)
    head = found.head(spec.head)
    lora = _lora_of(found)
    if lora is not None:
        _export_adapters(found, lora, out, spec, origin, side_directories, resources, dtype)
        return
    with PartialOutput(out) as output:
        tensors, sources = open_checkpoint(found, spec, head)
        tensors = cast_infos(tensors, spec, dtype)
        if template is not None and spec.untrained and not has_weights(template):
            problem = f"{template} has no weights, and tensors that are not trained come from it"
            raise UsageError(f"{problem} ({', '.join(spec.untrained)}); name a directory of the model with --hf")
        others = open_untrained(origin, spec)
        sources = sources.with_whole(others)
        tensors |= {name: tensor.info for name, tensor in others.items()}
        write_files(
            output,
            f"export {checkpoint.name}",
            lay_out(tensors, max_file_bytes),
            sources,
            resources,
        )
        for directory in side_directories:
            copy_side_files(directory, output.directory)
        embedding = next(iter(tensors.values()))
        write_json(
            output.directory / CONFIG_FILE,
            replace(spec, dtype=embedding.dtype).hf_config(head),
        )
        output.publish()


def cast_infos(
    tensors: Mapping[str, TensorInfo],
    spec: ModelSpec,
    dtype: str | None,
) -> dict[str, TensorInfo]:
    """Returns tensors with another dtype, but for those that keep theirs."""
    if dtype is None:
        return dict(tensors)
    fixed = spec.fixed_dtypes()
    return {name: replace(info, dtype=fixed.get(name, dtype)) for name, info in tensors.items()}


def write_files(
    output: PartialOutput, task: str, layouts: Sequence[SafetensorsFile], sources: Sources, resources: Resources
) -> None:
    """Writes safetensors files, and their index where there are several."""
    files: list[OutputFile] = []
    for layout in layouts:
        ordered = {name: layout.tensors[name] for name in layout.offsets}
        files.append(
            OutputFile(path=layout.name, assembly=sources.assembly(ordered), header=layout.header),
        )
    output.write(task, files, inputs=sources.files, resources=resources)
    write_index(output.directory, layouts)


def _lora_of(found: FoundCheckpoint) -> LoRA | None:
    """Returns the settings of the adapters of a run's role; None where its weights are trained."""
    if found.role is None:
        return None
    fields = field_at(read_config(found.root / "config.yaml"), f"{found.role}.lora")
    return None if fields is None else LoRA.model_validate(fields)


def _export_adapters(
    found: FoundCheckpoint,
    lora: LoRA,
    out: Path,
    spec: ModelSpec,
    origin: Path | None,
    side_directories: Sequence[Path],
    resources: Resources,
    dtype: str | None,
) -> None:
    head = found.head(spec.head)
    adapters = adapters_of(lora)
    with PartialOutput(out) as output:
        tensors, sources = open_checkpoint(found, spec, head, adapters)
        named = {PEFT_PREFIX + name: info for name, info in cast_infos(tensors, spec, dtype).items()}
        layouts = lay_out(named, sum(info.nbytes for info in named.values()), ADAPTER_FILE)
        write_files(
            output,
            f"export {found.root.name}",
            layouts,
            sources.renamed(PEFT_PREFIX),
            resources,
        )
        for directory in side_directories:
            copy_side_files(directory, output.directory)
        fields = adapter_config(
            base=str(origin or found.root / "model"),
            rank=lora.rank,
            alpha=lora.alpha,
            rslora=lora.rslora,
            targets=adapters.targets or adaptable(spec),
            transposed=spec.stores_transposes,
            has_head=head != "lm",
        )
        write_json(output.directory / ADAPTER_CONFIG, fields)
        output.publish()


def _model_of(found: FoundCheckpoint, template: Path | None) -> tuple[ModelSpec, Path | None, tuple[Path, ...]]:
    """Returns a checkpoint's model, its directory, and those with tokenizer and generation files; later ones win."""
    if template is not None or found.role is None:
        directory = template or found.root / HF_FILES
        if template is None and not (directory / CONFIG_FILE).is_file():
            fix = "name a directory that has its config.json and tokenizer with --hf"
            raise UsageError(f"{found.root} does not say which model it is of; {fix}")
        return read_spec(directory), directory, (directory,)
    path = found.root / "config.yaml"  # of the run, with the model from which the role started
    try:
        config = load(path)
        start = config.role_checkpoint(found.role)
        fields: Mapping[str, Any] = config.model.hf_config()
        spec = model_spec(fields) if start is None else read_spec(Path(start))
    except (ConfigError, OSError, ValueError) as error:
        problem = f"{path} does not lead to the model's config.json ({error})"
        raise UsageError(f"{problem}; name a directory that has it with --hf") from None
    origin = start or config.model.path
    directories = (config.model.path, config.model.tokenizer, start)
    side = tuple(Path(directory) for directory in directories if directory is not None)
    return spec, None if origin is None else Path(origin), side


def compare(
    hf: Path,
    checkpoint: Path,
    *,
    resources: Resources = DEFAULT,
    role: RoleName | None = None,
    step: int | None = None,
    dtype: str | None = None,
) -> tuple[int, list[str]]:
    """Compares every tensor of a directory with a checkpoint's; returns their number, and a line for each difference.

    Args:
        checkpoint, role, step: see ``find_checkpoint``.
        dtype: dtype to which both sides are cast; otherwise a tensor of another dtype differs.
    """
    found = find_checkpoint(checkpoint, role=role, step=step)
    spec = read_spec(hf)
    if _lora_of(found) is not None:
        raise UsageError(
            f"{found.root} has adapters of the {found.role} alone; export and merge them to compare the sum"
        )
    head = found.head(spec.head)
    if (head == "lm") != (spec.head == "lm"):
        raise UsageError(f"{hf} has the head {spec.head!r}, the {found.role} {head!r}; choose another --role")
    original = dict(open_hf(hf, spec.manifest(head)))
    converted, sources = open_checkpoint(found, spec, head)
    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    fixed = spec.fixed_dtypes()
    for name, tensor in original.items():
        info = converted[name]
        if dtype is None and info.dtype != tensor.info.dtype:
            problems.append(f"{name}: {info.dtype}, not {tensor.info.dtype}")
        wanted = dtype and fixed.get(name, dtype)
        tensors[name] = replace(tensor.info, dtype=wanted or tensor.info.dtype)
    if found.role is None and (found.root / HF_FILES / CONFIG_FILE).is_file():
        passed = open_untrained(found.root / HF_FILES, spec)
        for name, tensor in open_untrained(hf, spec).items():
            if name not in passed:
                problems.append(f"{name}: missing in {HF_FILES}")
                continue
            original[name] = tensor
            tensors[name] = tensor.info
        sources = sources.with_whole(passed)
    tasks: list[tuple[Assembly, Mapping[str, Stored]]] = []
    for group in group_tensors(tensors, _GROUP_BYTES):
        tasks.append((sources.assembly(group), {name: original[name] for name in group}))
    workers = resources.workers([assembly.memory for assembly, _ in tasks])
    for _, differences in run_tasks(tasks, _differences, workers):
        problems += differences
    return len(tensors), problems


def _differences(task: tuple[Assembly, Mapping[str, Stored]]) -> list[str]:
    """Returns a line for each tensor that differs."""
    converted, original = task
    differences: list[str] = []
    tensors = converted.read()
    for name, source in original.items():
        values = tensors.pop(name)
        expected = torch.empty_like(values)
        copy_values(source.read_rows(0, source.info.shape[0]), expected, source.path)
        # Of bits: equal NaNs are equal, zeros of two signs are not.
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
        count = values.view(integers).bitwise_xor_(expected.view(integers)).count_nonzero()
        if count:
            differences.append(f"{name}: {count} of {values.numel()} elements differ")
    return differences
