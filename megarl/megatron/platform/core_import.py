"""Importing megatron-core without its warnings, torch's compiler and wandb, whoever imports it first."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from megarl.lazy_compiling import absent, compiled_at_first_call

_CORE = "megatron.core"


def prepare_core_import() -> None:
    """Prepares the first import of megatron-core; imports nothing of it itself."""
    if _CORE not in sys.modules:
        sys.meta_path.insert(0, _CoreFinder())


class _CoreFinder(MetaPathFinder):
    """Finds megatron-core once, as the finders after it do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _CORE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader.exec_module)
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    # Megatron warns at import that Transformer Engine and apex are absent, and torch that nvcc is
    # here without a GPU; `megarl doctor` says it better.
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    # It calls collectives by names that torch 2.13 has renamed (0.19).
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Otherwise Megatron reports the commit of a repository around it (package_info.py, 0.19).
    os.environ["NO_VCS_VERSION"] = "1"
    # Its inference engine imports wandb where it can.
    with compiled_at_first_call(), absent("wandb"):
        execute(module)
