"""Merges adapters in PEFT's format into the weights of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megarl.convert.exporting import cast_infos, write_files
from megarl.convert.output import PartialOutput
from megarl.convert.resources import DEFAULT, Resources
from megarl.convert.stored import Merged, SafeTensor, Sources, Stored, open_hf, open_untrained, read_spec
from megarl.errors import UsageError
from megarl.models import ModelSpec
from megarl.models.lora import Adapters, adaptable, adapter_tensors
from megarl.weights.export import CONFIG_FILE, MAX_FILE_BYTES, copy_side_files, lay_out, write_json
from megarl.weights.hf_files import HFDirectory
from megarl.weights.peft_files import ADAPTER_FILE, PEFT_PREFIX, peft_manifest, read_adapter_config, scale_of


def merge_adapters(
    hf: Path,
    adapters: Path,
    out: Path,
    *,
    resources: Resources = DEFAULT,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a Hugging Face directory of a model with adapters merged into it; continues an interrupted one.

    Args:
        hf: directory of the model.
        adapters: directory of the adapters, in PEFT's format.
    """
    spec = read_spec(hf)
    if spec.head != "lm":
        raise UsageError(f"{hf} is no language model, and others are merged by a run with lora.merge")
    merged = dict(open_hf(hf, spec.manifest(spec.head)))
    merged |= _with_adapters(adapters, spec, merged)
    tensors = cast_infos({name: tensor.info for name, tensor in merged.items()}, spec, dtype)
    others = open_untrained(hf, spec)
    tensors |= {name: tensor.info for name, tensor in others.items()}
    sources = Sources(stored={}, copies={}).with_whole({**merged, **others})
    with PartialOutput(out) as output:
        write_files(
            output,
            f"merge {adapters.name}",
            lay_out(tensors, max_file_bytes),
            sources,
            resources,
        )
        copy_side_files(hf, output.directory)
        embedding = next(iter(tensors.values()))
        write_json(
            output.directory / CONFIG_FILE,
            replace(spec, dtype=embedding.dtype).hf_config(spec.head),
        )
        output.publish()


def _with_adapters(
    directory: Path,
    spec: ModelSpec,
    base: Mapping[str, Stored],
) -> dict[str, Stored]:
    """Returns the tensors of a model that adapters change; raises CheckpointError where these do not fit."""
    fields = read_adapter_config(directory)
    targets = fields["target_modules"]
    known = adaptable(spec)
    chosen: tuple[str, ...] | None = None
    if targets != "all-linear":
        chosen = tuple(sorted(target.rpartition(".")[2] for target in targets))
        if unknown := sorted(set(chosen) - known):
            names = ", ".join(sorted(known))
            raise UsageError(f"{directory} has adapters of {', '.join(unknown)}; the model's linear layers are {names}")
    adapters = Adapters(rank=fields["r"], scale=scale_of(fields), targets=chosen)
    files = HFDirectory(directory, ADAPTER_FILE)
    files.check(peft_manifest(adapter_tensors(spec, adapters)))
    found: dict[str, Stored] = {}
    for name in files.tensors:
        module, _, side = name.removesuffix(".weight").rpartition(".lora_")
        if side != "A":
            continue
        sides: dict[str, SafeTensor] = {}
        for each in ("A", "B"):
            stored = f"{module}.lora_{each}.weight"
            sides[each] = SafeTensor(path=files.path / ADAPTER_FILE, name=stored, info=files.tensors[stored])
        weight = f"{module.removeprefix(PEFT_PREFIX)}.weight"
        matrix = base[weight]
        assert isinstance(matrix, SafeTensor)
        found[weight] = Merged(
            base=matrix,
            a=sides["A"],
            b=sides["B"],
            scale=adapters.scale,
            transposed=spec.stores_transposes,
        )
    return found
