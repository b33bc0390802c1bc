"""What must be so while megatron-core is imported, whoever imports it first."""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from megarl.megatron.platform.compiling import compiled_at_first_call

_CORE = "megatron.core"


def prepare_core_import() -> None:
    """Lets megatron-core be imported without its warnings and without the compiler; imports nothing of it itself."""
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
            _prepare(spec.loader)
        return spec


def _prepare(loader: Loader) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # Megatron warns at import that Transformer Engine and apex are absent, which `megarl doctor` says better; and
        # it calls collectives by names that torch 2.13 has renamed (0.16).
        warnings.filterwarnings("ignore", module=r"megatron\..*")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
        logging.getLogger("megatron").setLevel(logging.ERROR)
        with compiled_at_first_call():
            execute(module)

    loader.exec_module = exec_module
