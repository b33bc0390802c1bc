"""The placement of a run whose configuration names no devices: one device of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

_DEVICES: Final = Path("/dev")
_DEVICE_FIELDS: Final = ("nodes", "devices_per_node", "device", "address")


def on_one_device(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration that names no devices with one of this machine: a GPU or, without one, the CPU.

    The trainers and the engine share it. Any other configuration stays as it is.
    """
    cluster, rollout, stage = _section(raw, "cluster"), _section(raw, "rollout"), raw.get("stage")
    if raw.get("groups") or rollout.get("devices") or any(field in cluster for field in _DEVICE_FIELDS):
        return dict(raw)
    device = "cuda" if _has_gpu() else "cpu"
    roles, samples = _roles(raw), raw.get("rollout") is not None
    taking_turns = device == "cuda" and len(roles) + samples > 1
    role = {"offload": True} if taking_turns else {}
    placed: dict[str, Any] = {"cluster": {"device": device, "devices_per_node": 1, **cluster}}
    if roles:
        placed["groups"] = {"train": {"devices": "0", "roles": dict.fromkeys(roles, role)}}
    if samples:
        asleep = {"sleep": True} if taking_turns and stage != "eval" else {}
        placed["rollout"] = {"devices": "0", **asleep, **rollout}
    return {**raw, **placed}


def _roles(raw: Mapping[str, Any]) -> list[str]:
    """Returns the roles that the configuration needs."""
    scored = _section(raw, "reward").get("path") is not None
    penalty = _section(_section(raw, "algo"), "kl").get("coef")
    match raw.get("stage"):
        case "sft":
            return ["actor"]
        case "reward_model":
            return ["reward"]
        case "eval":
            return ["reward"] if scored else []
        case _:
            needed = {"critic": raw.get("critic") is not None, "reference": bool(penalty), "reward": scored}
            return ["actor", *(role for role, is_needed in needed.items() if is_needed)]


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = raw.get(name)
    return cast(Mapping[str, Any], section) if isinstance(section, Mapping) else {}


def _has_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU that the environment does not hide."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(_DEVICES.glob("nvidia[0-9]*"))
