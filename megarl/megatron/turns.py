"""Roles of one process that take turns in the memory of its device."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from megarl.megatron.role import Role
from megarl.types import RoleName


class Turns:
    """Keeps those roles in host memory that may be and have nothing to do.

    Args:
        roles: of this process; more may come.
        offloadable: which of them may be offloaded; the others stay on the device.
    """

    def __init__(self, roles: Mapping[RoleName, Role], offloadable: Collection[RoleName]) -> None:
        self._roles, self._offloadable = roles, frozenset(offloadable)

    def take(self, name: RoleName, *others: RoleName) -> Role:
        """The role with its memory on the device, which it has alone, save for roles that stay there, and others."""
        self._offload(self._offloadable - {name, *others})
        for present in (name, *others):
            self._roles[present].onload()
        return self._roles[name]

    def rest(self) -> None:
        """Offloads every role that may be: the device is for others."""
        self._offload(self._offloadable)

    def _offload(self, names: frozenset[RoleName]) -> None:
        released = sum(self._roles[name].offload() for name in sorted(names & self._roles.keys()))
        if released:
            torch.cuda.empty_cache()  # memory that the allocator keeps is of no use to another process
