"""Directories of adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

The format is that of PEFT 0.21. vLLM and transformers read it, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megarl.weights.hf_files import CheckpointError, read_config
from megarl.weights.shard_map import Manifest, TensorInfo

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of tensors."""


_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
)
"""Fields of ``adapter_config.json`` that make adapters something else, where they are set."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def adapter_export(export: Path) -> Path:
    """Returns the directory of adapters beside that of an exported model."""
    return export.with_name(f"{export.name}-adapter")


def peft_manifest(tensors: Mapping[str, TensorInfo]) -> Manifest:
    """Returns what a directory of adapters with these canonical tensors must contain."""
    stored = {PEFT_PREFIX + name: info for name, info in tensors.items()}
    return Manifest(tensors=stored, ignored=(f"{PEFT_PREFIX}score.weight",))


def read_adapter_config(directory: str | Path) -> dict[str, Any]:
    """Returns the fields of ``adapter_config.json``; raises CheckpointError for something else."""
    fields = read_config(Path(directory) / ADAPTER_CONFIG)
    problems: list[str] = []
    if fields.get("peft_type") != "LORA":
        problems.append(f"its peft_type is {fields.get('peft_type')!r:.100}, not LORA")
    for name in _UNSUPPORTED:
        if fields.get(name):
            problems.append(f"it has {name}, which is not supported")
    if fields.get("init_lora_weights", True) not in _PLAIN_STARTS:
        # Others change the model below, too.
        problems.append(f"its init_lora_weights is {fields['init_lora_weights']!r:.100}, which is not supported")
    targets = fields.get("target_modules")
    if targets != "all-linear" and not isinstance(targets, list):
        problems.append("its target_modules are no list of names; a pattern is not supported")
    for name in ("r", "lora_alpha"):
        if not isinstance(fields.get(name), int | float):
            problems.append(f"its {name} is not a number")
    if problems:
        raise CheckpointError(f"{Path(directory) / ADAPTER_CONFIG} is not supported", problems)
    return fields


def scale_of(fields: Mapping[str, Any]) -> float:
    """Returns the factor of the products B A that an ``adapter_config.json`` states."""
    rank = fields["r"]
    return fields["lora_alpha"] / (rank**0.5 if fields.get("use_rslora") else rank)


def adapter_config(
    *, base: str, rank: int, alpha: float, rslora: bool, targets: Collection[str], transposed: bool, has_head: bool
) -> dict[str, Any]:
    """Returns the contents of ``adapter_config.json``.

    Args:
        base: directory of the model to which the adapters belong.
        transposed: whether Hugging Face stores the matrices of the model as [inputs, outputs].
        has_head: whether a scalar head was trained, which the directory has then.
    """
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "target_modules": sorted(targets),
        "modules_to_save": ["score"] if has_head else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }
