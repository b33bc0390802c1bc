"""The roles of a process that take turns on its device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from megarl.types import RoleName

if TYPE_CHECKING:
    from megarl.megatron.model_engine import ModelEngine


class Offloader:
    """Keeps idle roles that may be offloaded in host memory; roles may be added later."""

    def __init__(self, roles: Mapping[RoleName, ModelEngine], offloadable: Collection[RoleName]) -> None:
        self._roles = roles
        self._offloadable = frozenset(offloadable)

    def onload(self, name: RoleName, *others: RoleName) -> ModelEngine:
        """Returns the role with its memory on the device; offloads all roles but it and ``others``."""
        self.offload_all(but=(name, *others))
        for present in (name, *others):
            self._roles[present].onload()
        return self._roles[name]

    def offload_all(self, but: Collection[RoleName] = ()) -> None:
        """Offloads every offloadable role, so that another process can use the device."""
        freed = 0
        for name in sorted(self._offloadable & self._roles.keys()):
            if name not in but:
                freed += self._roles[name].offload()
        if freed:
            torch.cuda.empty_cache()  # for other processes
