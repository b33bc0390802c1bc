"""The buffers of NCCL's communicators on a GPU, bytes.

Nothing here was measured: the figures follow from NCCL's sources and from what it prints.
"""

from __future__ import annotations

from megarl.config import RolloutTrainingConfig, RunConfig, parse_devices
from megarl.types import Layout

CHANNEL = 19 << 19
"""Buffers of a channel of a receiving connection, 9.5 MiB: 4 of the protocol Simple (NCCL_BUFFSIZE), 4.7 of LL128,
0.5 of LL, and their flags."""
_MIB = 1 << 20
COMMUNICATOR = 16 * CHANNEL
"""Buffers of a communicator: with its neighbor in the ring it has 16 channels where an NVSwitch joins the GPUs
(NVIDIA/nccl#892)."""
PEER = 32 * 14 * _MIB
"""Buffers for each peer with which a rank exchanges messages: 32 channels (graph/paths.cc), 14 MiB each, as
measured of an all-to-all of 8 H100s (NVIDIA/nccl#1685)."""
NVLS = 32 * _MIB
"""Buffers for each rank of a node, of a communicator that reduces in the NVSwitch: 16 channels (transport/nvls.cc)."""
_PAIR = 4 * CHANNEL
"""Buffers of the sync's communicator of two ranks, on the receiving one; `max_ctas` bounds the channels."""


def nccl_bytes(config: RunConfig, device: int) -> int:
    """Returns the buffers on a device: of its roles' groups, of an engine's ranks, and of the sync's receiver."""
    groups: set[tuple[str, Layout]] = set()
    for name, group in config.groups.items():
        if device not in config.device_list(name):
            continue
        for role in group.roles:
            layout = config.layout(role)
            for dimension in ("tp", "pp", "dp", "ep"):
                if getattr(layout, dimension) > 1:
                    groups.add((dimension, layout))
            if layout.world_size not in (layout.tp, layout.dp):
                groups.add(("world", layout))
    nbytes = sum(_group_bytes(config, *group) for group in groups)
    rollout = config.engine_settings
    if rollout is not None and device in parse_devices(rollout.devices):
        if rollout.tp > 1:
            nbytes += COMMUNICATOR
        if isinstance(config, RolloutTrainingConfig):
            nbytes += _PAIR * _senders(config, device)
    return nbytes


def _group_bytes(config: RunConfig, dimension: str, layout: Layout) -> int:
    """Returns the buffers of a group of ranks: messages to peers of ``pp`` and ``ep``, else reductions."""
    if dimension == "pp":
        return PEER * min(2, layout.pp - 1)
    if dimension == "ep":
        return PEER * (layout.ep - 1)
    ranks = layout.world_size
    if dimension != "world":
        ranks = getattr(layout, dimension)
    if ranks == 1:
        return 0
    nbytes = COMMUNICATOR
    here = min(ranks, config.cluster.devices_per_node)
    if here > 2:
        nbytes += NVLS * here
    return nbytes


def _senders(config: RolloutTrainingConfig, device: int) -> int:
    """Returns how many other ranks of the actor may send to an engine's rank, or to the trainer on its device.

    They are of the same node, if that has all of a replica.
    """
    layout = config.layout("actor")
    ranks = config.device_list(config.group_of("actor"))
    replica = layout.tp * layout.pp * layout.ep
    senders = max(replica, min(len(ranks), config.cluster.devices_per_node))
    if device not in ranks:
        return senders
    return senders - 1 if replica > 1 else 0
