"""Devices of a configuration that names none, and whether engines sleep on shared ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from megarl.config.schema.base import parse_devices, raw_section
from megarl.config.schema.run_config import TrainingConfig, raw_stage_class

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


def asleep_where_shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration in which engines sleep on GPUs of groups, unless it has `rollout.sleep`.

    On a CPU, sleep frees nothing; engines of evaluations, and those without a sync at every step,
    keep their weights.
    """
    rollout = raw_section(raw, "rollout")
    groups = raw_section(raw, "groups")
    on_cpu = raw_section(raw, "cluster").get("device") == "cpu"
    schema = raw_stage_class(raw)
    trains = schema is not None and issubclass(schema, TrainingConfig)
    if not rollout or "sleep" in rollout or on_cpu or not trains or rollout.get("sync_every", 1) != 1:
        return dict(raw)
    devices = [raw_section(groups, name).get("devices") for name in groups if groups[name] is not None]
    try:
        trained_on = {device for listed in devices for device in parse_devices(str(listed))}
        shared = trained_on.intersection(parse_devices(str(rollout.get("devices"))))
    except ValueError:  # the schema says what is wrong
        return dict(raw)
    return {**raw, "rollout": {**rollout, "sleep": True}} if shared else dict(raw)


def _has_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU that the environment does not hide."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(_DEVICES.glob("nvidia[0-9]*"))
