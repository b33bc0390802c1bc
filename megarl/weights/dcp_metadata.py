"""``.metadata``, the index of a directory of ``torch.distributed.checkpoint``.

It is a pickle, which could run code. It is read with the few classes that describe tensors, and
refused where it needs others.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.serialization import _get_layout  # pyright: ignore

from megarl.files import open_file
from megarl.weights.hf_files import CheckpointError

METADATA = ".metadata"

_INDEX_CLASSES = (*metadata.__all__, "_MEM_FORMAT_ENCODING")
_PLAN_CLASSES = ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
_KNOWN: Mapping[str, Mapping[str, Any]] = {
    "torch.distributed.checkpoint.metadata": {name: getattr(metadata, name) for name in _INDEX_CLASSES},
    "torch.distributed.checkpoint.planner": {name: getattr(planner, name) for name in _PLAN_CLASSES},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": filesystem._StorageInfo},  # pyright: ignore[reportPrivateUsage]
    # The same classes in releases of megatron-core.
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata": Metadata, "MCoreSavePlan": planner.SavePlan},
    "torch.serialization": {"_get_layout": _get_layout},
    "collections": {"OrderedDict": OrderedDict, "defaultdict": defaultdict},
    "builtins": {"list": list, "dict": dict, "set": set},
    "pathlib": {"PosixPath": PosixPath},
    "pathlib._local": {"PosixPath": PosixPath},  # the same in Python 3.13
}


def read_metadata(directory: Path) -> Metadata:
    """Reads ``.metadata``; raises CheckpointError where it is missing, damaged, or needs other classes."""
    try:
        with open_file(directory / METADATA) as stream:
            return _MetadataUnpickler(stream).load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read", [f"{METADATA}: {error.strerror}"]) from None
    except Exception as error:  # a damaged pickle raises anything
        problem = f"{METADATA} is corrupted: {error!r}"
        raise CheckpointError(f"{directory} cannot be read", [problem]) from None


def check_tensors_alone(directory: Path) -> None:
    """Raises CheckpointError unless a directory has tensors alone: torch unpickles other objects."""
    found = read_metadata(directory)
    foreign: list[str] = []
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            foreign.append(key)
    for place in found.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            foreign.append(place.relative_path)
    if foreign:
        problem = f"{METADATA} has {foreign[0]!r}, no tensor in its own files"
        raise CheckpointError(f"{directory} is refused", [problem])


class _MetadataUnpickler(pickle.Unpickler):
    """Makes objects of the classes that describe tensors, and of no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            found = getattr(torch, name, None)
            if name == "Size" or isinstance(found, torch.dtype):
                return found
        if name in _KNOWN.get(module, {}):
            return _KNOWN[module][name]
        problem = f"it needs {module}.{name}, which no index of tensors does"
        raise CheckpointError(f"{METADATA} is refused", [problem])
