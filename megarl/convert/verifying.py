"""Whether a checkpoint holds the tensors of a Hugging Face directory, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megarl.convert.chunks import Block, blocks
from megarl.convert.errors import UsageError
from megarl.convert.held import open_held
from megarl.convert.hf import open_hf, read_spec
from megarl.convert.locating import find
from megarl.convert.memory import Resources
from megarl.convert.parts import grouped, part_bytes
from megarl.convert.progress import Meter
from megarl.convert.running import run
from megarl.convert.stored import BoxReader, Stored, StoredTensor
from megarl.types import RoleName
from megarl.weights.shard_map import ShardMap

_STRIP = 1 << 16
"""Elements whose differences are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How a tensor of the checkpoint differs.

    Args:
        tensor: its canonical name.
        elements: that differ, of ``of``.
        largest: absolute difference of finite elements.
    """

    tensor: str
    elements: int
    of: int
    largest: float

    def __str__(self) -> str:
        return f"{self.tensor}: {self.elements} of {self.of} elements differ, by {self.largest:.3g} at most"


def compare(
    hf: Path,
    checkpoint: Path,
    *,
    resources: Resources,
    role: RoleName | None = None,
    step: int | None = None,
    dtype: str | None = None,
    allow_pickle: bool = False,
) -> tuple[int, list[str]]:
    """Compares every tensor of a directory with a checkpoint's.

    Args:
        hf: the directory.
        checkpoint, role, step: as of ``locating.find``.
        resources: what may be used.
        dtype: to which both sides are cast; otherwise a tensor of another dtype differs.
        allow_pickle: read ``pytorch_model.bin`` where there is no safetensors file.

    Returns:
        The number of tensors, and a line for each that differs.

    Raises:
        UsageError: it cannot be done as asked.
        BrokenError, BrokenCheckpointError, CheckpointError: files are damaged, or their tensors are not the model's.
        PlanError: some elements of the model are in no file.
    """
    found, spec = find(checkpoint, role=role, step=step), read_spec(hf)
    head = found.head(spec.head)
    if (head == "lm") != (spec.head == "lm"):
        kinds = ("a language model", "a model with scores")[:: 1 if spec.head == "lm" else -1]
        raise UsageError(f"{hf} is {kinds[0]}, the {found.role} {kinds[1]}; choose another --role")
    source = open_hf(hf, allow_pickle=allow_pickle).fitted(spec.manifest(head))
    found.check()
    held = open_held(found, spec, head)
    own = source.tensors
    other = {} if dtype else {name: info for name, info in held.tensors.items() if info.dtype != own[name].dtype}
    problems = [f"{name}: {info.dtype}, not {own[name].dtype}" for name, info in other.items()]
    tensors = {name: replace(info, dtype=dtype or info.dtype) for name, info in own.items()}
    target = ShardMap.identity(tensors)
    block_bytes = resources.block_bytes(len(tensors), 2 * target.nbytes) // 2  # of either side
    groups = grouped(blocks(held.map, target, block_bytes), part_bytes(target.nbytes))
    parts = [
        _Comparison(
            blocks=group,
            held={name: held.stored[name] for block in group for name in block.sources},
            own={block.target: source.stored[block.target] for block in group},
            scratch_bytes=block_bytes,
        )
        for group in groups
    ]
    differences: dict[str, Difference] = {}
    with Meter(f"verify {checkpoint.name}", sum(part.nbytes for part in parts)) as meter:
        for part, differing in run(parts, _Comparison.run, resources.processes):
            meter.advance(part.nbytes)
            for found_here in differing:
                known = differences.get(found_here.tensor)
                differences[found_here.tensor] = found_here if known is None else _together(known, found_here)
    return len(tensors), [*problems, *(str(differences[name]) for name in tensors if name in differences)]


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Blocks to compare; travels to the workers.

    Args:
        blocks: of canonical tensors.
        held: the checkpoint's tensors.
        own: the directory's.
        scratch_bytes: of memory for reading.
    """

    blocks: tuple[Block, ...]
    held: Mapping[str, Stored]
    own: Mapping[str, StoredTensor]
    scratch_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def run(self) -> list[Difference]:
        """The blocks that differ."""
        found: list[Difference] = []
        with BoxReader(self.scratch_bytes) as reader:
            for block in self.blocks:
                held = block.read(self.held, reader)
                expected = torch.empty_like(held)
                reader.read(self.own[block.target], block.box, expected)
                if not torch.equal(_bits(held), _bits(expected)):
                    found.append(_difference(block, held, expected))
        return found


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The values as integers: NaNs are equal to themselves, zeros of different signs are not."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


def _difference(block: Block, held: torch.Tensor, expected: torch.Tensor) -> Difference:
    count, largest = 0, 0.0
    for own, other in zip(held.flatten().split(_STRIP), expected.flatten().split(_STRIP), strict=True):
        count += int((_bits(own) != _bits(other)).sum())
        largest = max(largest, float((own.double() - other.double()).abs().nan_to_num(0.0, 0.0).max()))
    return Difference(tensor=block.target, elements=count, of=held.numel(), largest=largest)


def _together(a: Difference, b: Difference) -> Difference:
    return Difference(tensor=a.tensor, elements=a.elements + b.elements, of=a.of, largest=max(a.largest, b.largest))
