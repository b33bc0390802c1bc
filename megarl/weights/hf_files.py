"""Hugging Face directories: safetensors files read by region."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megarl.files import open_file, read_json
from megarl.weights.planner import Holder, plan
from megarl.weights.shard_map import ITEM_BYTES, Box, Manifest, Shard, ShardMap, TensorInfo

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES: Mapping[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes by their names in safetensors headers."""

_COMPARED = 1 << 20
"""Elements compared at a time."""
_LONGEST_LINE = 500
FILES_RANK = -1
"""The rank of files in a plan; no process has it."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit; the message lists every problem."""

    def __init__(self, what: str, problems: Sequence[str] = ()) -> None:
        if problems:
            what += ":"
        for line in problems:
            if len(line) > _LONGEST_LINE:
                line = f"{line[:_LONGEST_LINE]}..."
            what += f"\n  {line}"
        super().__init__(what)


def read_config(path: str | Path) -> dict[str, Any]:
    """Returns the fields of a ``config.json``, given its path or its directory, or raises CheckpointError."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config: object = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return cast("dict[str, Any]", config)


def read_weight_map(path: Path) -> dict[str, str]:
    """Returns the file of each tensor, which lies beside an index such as ``model.safetensors.index.json``."""
    try:
        held: dict[str, str] = read_json(path)["weight_map"]
        files = sorted(set(held.values()))
        foreign = [file for file in files if Path(file).name != file or file in ("", "..")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is corrupted: no index of tensors ({error!r})") from None
    if foreign:
        raise CheckpointError(f"{path} names files of other directories: {', '.join(foreign)}")
    return held


class HFDirectory:
    """The tensors of a directory with ``model.safetensors``, or an index and several files; reads headers only.

    Args:
        single: name of the file, if it is the only one.
    """

    def __init__(self, directory: str | Path, single: str = SINGLE_FILE) -> None:
        self.path = Path(directory)
        self.file_of: dict[str, Path] = {}
        self.tensors: dict[str, TensorInfo] = {}
        only = self.path / single
        index_file = self.path / INDEX_FILE
        index: dict[str, Path] = {}
        if single != SINGLE_FILE:
            if not only.is_file():
                raise CheckpointError(f"{self.path} has no {single}")
        elif index_file.is_file():
            index = {name: self.path / file for name, file in read_weight_map(index_file).items()}
        elif not only.is_file():
            missing = f"{self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}"
            raise CheckpointError(f"{missing} (pickle files are not read)")
        problems: list[str] = []
        for file in sorted(set(index.values())) or [only]:
            try:
                held = _header(file)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for name, info in held.items():
                if name in self.file_of:
                    problems.append(f"{name} is in {self.file_of[name].name} and in {file.name}")
                self.tensors[name] = info
                self.file_of[name] = file
            for name, named_file in index.items():
                if named_file == file and name not in held:
                    problems.append(f"{file.name} lacks {name}")
        if problems:
            raise CheckpointError(f"{self.path} cannot be read", problems)
        if index and only.is_file() and set(index.values()) != {only}:
            places = f"in {only.name}, which transformers reads, and in the files of {INDEX_FILE}"
            problem = f"{self.path} has its weights twice, {places}, which MegaRL and vLLM read"
            raise CheckpointError(f"{problem}; remove one of the two")

    def map(self, manifest: Manifest) -> ShardMap:
        """Returns the shard map: the manifest's tensors under the names of this directory."""
        tensors: dict[str, TensorInfo] = {}
        shards: list[Shard] = []
        for name, info in self.tensors.items():
            held = manifest.shards(name, info)
            if held:
                tensors[name] = info
                shards += held
        return ShardMap(params=tensors, shards=tuple(shards))

    def matching(self, patterns: Sequence[str]) -> dict[str, TensorInfo]:
        """Returns the tensors whose names match one of the patterns (as of fnmatch)."""
        found: dict[str, TensorInfo] = {}
        for name, info in self.tensors.items():
            if matches(name, patterns):
                found[name] = info
        return found

    def check(self, manifest: Manifest) -> None:
        """Raises CheckpointError, with all tensors, where some are missing, unknown or of another shape."""
        problems = misfits(self.tensors, manifest) or untied(self.tensors, manifest, self._read)
        if problems:
            raise CheckpointError(f"{self.path} does not fit the model", problems)

    def parts(self, name: str, elements: int) -> Iterator[torch.Tensor]:
        """Yields a tensor in row-major order, in parts of at most so many elements."""
        with _open(self.file_of[name]) as reader:
            stored = reader.get_slice(name)
            for box in Box.whole(self.tensors[name].shape).split(elements):
                yield stored[box.slices]

    def _read(self, name: str, box: Box) -> torch.Tensor:
        with _open(self.file_of[name]) as reader:
            return reader.get_slice(name)[box.slices]


def has_weights(directory: Path) -> bool:
    """Whether a directory has safetensors files that are read."""
    return any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a tensor's name matches one of the patterns (as of fnmatch)."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def misfits(tensors: Mapping[str, TensorInfo], manifest: Manifest) -> list[str]:
    """Lists every tensor that a checkpoint lacks, has in another shape, or must not have; in this order."""
    needed = manifest.tensors
    named = {manifest.canonical(name) for name in tensors}
    for stack in tensors.keys() & manifest.stacks.keys():
        for members in manifest.stacks[stack]:
            named.update(members)
    problems = [f"missing: {name} {list(info.shape)}" for name, info in needed.items() if name not in named]
    unknown: list[str] = []
    for name, info in sorted(tensors.items()):
        canonical = manifest.canonical(name)
        wanted = needed.get(canonical)
        if name in manifest.stacks:
            wanted = TensorInfo(manifest.stacked_shape(name), info.dtype)
            for member in sorted(set(chain.from_iterable(manifest.stacks[name])) & tensors.keys()):
                problems.append(f"twice: {member} is in {name}")
        if wanted is None:
            if matches(name, manifest.untrained):
                problems += _unsupported_dtype(name, info)
            elif not matches(name, manifest.ignored):
                unknown.append(f"unknown: {name} {list(info.shape)}")
            continue
        if name != canonical and canonical in tensors:
            problems.append(f"twice: {name} is {canonical}")
        if wanted.shape != info.shape:
            problems.append(f"misshapen: {name} is {list(info.shape)}, not {list(wanted.shape)}")
        problems += _unsupported_dtype(name, info)
    return problems + unknown


def _unsupported_dtype(name: str, info: TensorInfo) -> list[str]:
    if info.dtype in ITEM_BYTES:
        return []
    supported = ", ".join(ITEM_BYTES)
    return [f"of another dtype: {name} is {info.dtype}; supported are {supported}"]


def untied(
    tensors: Mapping[str, TensorInfo], manifest: Manifest, read: Callable[[str, Box], torch.Tensor]
) -> list[str]:
    """Lists tensors that differ from others that they should equal by ``manifest.tied``.

    transformers unties them, vLLM does not.

    Args:
        read: function that returns a box of a tensor.
    """
    import torch

    stored = {manifest.canonical(name): name for name in tensors}
    problems: list[str] = []
    for name, canonical in manifest.tied.items():
        info = tensors.get(name)
        if info is None:
            continue
        other = stored[canonical]
        boxes = Box.whole(info.shape).split(_COMPARED)
        same = info == tensors[other] and all(torch.equal(read(name, box), read(other, box)) for box in boxes)
        if not same:
            problem = f"untied: {name} differs from {other}, against tie_word_embeddings"
            problems.append(f"{problem}; set that to false")
    return problems


def load_shard(
    shard_map: ShardMap, directory: str | Path, manifest: Manifest, single: str = SINGLE_FILE
) -> dict[str, torch.Tensor]:
    """Reads a holder's local parameters, and nothing else, from an HF directory.

    Args:
        shard_map: map of the holder; tensors get its dtypes, and zeros as padding.
        manifest: tensors to read; parameters of others are omitted.
        single: see ``HFDirectory``.
    """
    import torch

    source = HFDirectory(directory, single)
    source.check(manifest)
    dropped = {shard.param for shard in shard_map.shards if shard.name not in manifest.tensors}
    wanted = ShardMap(
        params={name: info for name, info in shard_map.params.items() if name not in dropped},
        shards=tuple(shard for shard in shard_map.shards if shard.param not in dropped),
        padding=tuple((param, box) for param, box in shard_map.padding if param not in dropped),
    )
    files = Holder(rank=FILES_RANK, map=source.map(manifest))
    transfer = plan([files], [Holder(rank=0, map=wanted)], bucket_bytes=1 << 30)
    tensors: dict[str, torch.Tensor] = {}
    for name, info in wanted.params.items():
        tensors[name] = torch.zeros(info.shape, dtype=getattr(torch, info.dtype))
    with ExitStack() as stack:

        @cache
        def reader(file: Path) -> Any:
            return stack.enter_context(_open(file))

        for sender in transfer.senders.values():
            for copy in sender.copies:
                values = reader(source.file_of[copy.source]).get_slice(copy.source)[copy.source_box.slices]
                tensors[copy.target][copy.target_box.slices] = copy.arranged(values)
    return tensors


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return cast("Callable[..., Any]", safe_open)(str(file), framework="pt")


def _header(file: Path) -> dict[str, TensorInfo]:
    """Returns the tensors' shapes and dtypes; dtypes that weights cannot have keep their safetensors names."""
    from safetensors import SafetensorError

    try:
        with open_file(file), _open(file) as reader:
            tensors: dict[str, TensorInfo] = {}
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                view = reader.get_slice(name)
                code = str(view.get_dtype())
                tensors[name] = TensorInfo(tuple(view.get_shape()), DTYPES.get(code, code))
            return tensors
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file.name} is corrupted: {error}") from error
