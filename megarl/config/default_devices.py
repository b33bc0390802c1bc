"""Devices of a configuration that names none, and whether engines sleep on shared ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from megarl.config.schema import RunConfig, raw_stage_class, trains
from megarl.config.schema.base import raw_section
from megarl.config.schema.cluster_sections import shared_devices

_DEVICES: Final = Path("/dev")
_DEVICE_FIELDS: Final = ("nodes", "devices_per_node", "device", "address")


def on_one_device(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without devices on one of this machine, shared by all: a GPU, or else the CPU."""
    cluster = raw_section(raw, "cluster")
    rollout = raw_section(raw, "rollout")
    if raw.get("groups") or rollout.get("devices") or any(field in cluster for field in _DEVICE_FIELDS):
        return dict(raw)
    device = "cuda" if _has_gpu() else "cpu"
    schema = raw_stage_class(raw)
    roles = [] if schema is None else schema.default_roles(raw)
    samples = raw.get("rollout") is not None
    taking_turns = device == "cuda" and len(roles) + samples > 1
    role = {"offload": True} if taking_turns else {}
    placed: dict[str, Any] = {"cluster": {"device": device, "devices_per_node": 1, **cluster}}
    if roles:
        placed["groups"] = {"train": {"devices": "0", "roles": dict.fromkeys(roles, role)}}
    if samples:
        placed["rollout"] = {"devices": "0", **rollout}
    return {**raw, **placed}


def asleep_where_shared[C: RunConfig](config: C) -> C:
    """Returns a configuration in which engines sleep on GPUs of groups, unless it has `rollout.sleep`.

    On a CPU, sleep frees nothing; engines of evaluations, and those without a sync at every step,
    keep their weights.
    """
    rollout = config.engine_settings
    if rollout is None or "sleep" in rollout.model_fields_set or rollout.sync_every > 1:
        return config
    if config.cluster.device == "cpu" or not trains(config.stage):
        return config
    if not shared_devices(config.groups, rollout):
        return config
    return config.model_copy(update={"rollout": rollout.model_copy(update={"sleep": True})})


def _has_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU that the environment does not hide."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(_DEVICES.glob("nvidia[0-9]*"))
