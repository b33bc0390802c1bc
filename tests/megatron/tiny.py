"""Tiny Hugging Face models, and the naive way to bring one into a role: read everything, then cut."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.types import Layout, RoleName

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "dtype": "float32",
}
GPT2_SIZES = {
    "n_layer": 4,
    "n_embd": 32,
    "n_inner": 48,
    "n_head": 8,
    "vocab_size": 100,
    "n_positions": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.0),
    "dtype": "float32",
}


def hf_config(model_type: str, **fields: Any) -> dict[str, Any]:
    """Fields of a config.json."""
    from transformers import AutoConfig

    sizes = GPT2_SIZES if model_type == "gpt2" else {**SIZES, "rope_theta": 10000.0}
    return AutoConfig.for_model(model_type, **{**sizes, **fields}).to_dict()


def save_model(directory: Path, model_type: str = "qwen2", seed: int = 0, **fields: Any) -> Path:
    """Writes a random language model, with weights large enough that every part of it matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(model_type, **fields)))
    for name, parameter in model.named_parameters():
        scales = parameter.ndim == 1 and name.endswith("weight")  # of a norm
        if model_type.startswith(("gemma", "qwen3_5", "qwen3_next")):
            # Their norms, but for those of delta nets, multiply by 1 + weight.
            scales = name.endswith("linear_attn.norm.weight")
        parameter.data.normal_(1.0 if scales else 0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def random_head(directory: Path) -> torch.Tensor:
    """[1, hidden], a value or score head for a model; always the same."""
    import json

    config = json.loads((directory / "config.json").read_text())
    hidden = config["n_embd" if config["model_type"] == "gpt2" else "hidden_size"]
    return 0.2 * torch.randn(1, hidden, generator=torch.Generator().manual_seed(5))


def load_role(
    directory: Path,
    name: RoleName,
    layout: Layout,
    rank: int,
    cache: Any = None,
    *,
    head: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """A role with the weights of an HF directory, cut by the shard map from whole tensors.

    Args:
        cache: of groups that roles of a world share.
        head: [1, hidden], the value or score head.
        options: of the engine.
    """
    from safetensors.torch import load_file

    from megarl.megatron.model_engine import ModelEngine
    from megarl.megatron.parallel import GroupCache

    spec = spec_of(directory)
    whole = load_file(directory / "model.safetensors")
    if head is not None:
        whole["score.weight"] = head
    role = ModelEngine(name, spec, layout, rank, GroupCache() if cache is None else cache, dtype=dtype, **options)
    role.load(local_parts(role.shard_map, whole))
    return role


def local_parts(shard_map: Any, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Local parameters, cut from whole tensors by their names."""
    local = {param: torch.zeros(info.shape) for param, info in shard_map.params.items()}
    for shard in shard_map.shards:
        if shard.name in whole:
            values = whole[shard.name][shard.region.slices]
            local[shard.param][shard.box.slices] = values.mT if shard.transposed else values
    return local


def spec_of(directory: Path) -> Any:
    """The specification of a model in a directory."""
    import json

    from megarl.models import model_spec

    return model_spec(json.loads((directory / "config.json").read_text()))


def save_adapters(spec: Any, adapters: Any, at: Path, seed: int = 7) -> dict[str, torch.Tensor]:
    """Writes random adapters of a model as PEFT does, of which both matrices matter; returns them by canonical name."""
    import json

    from safetensors.torch import save_file

    from megarl.models.lora import adaptable, adapter_tensors

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, info in adapter_tensors(spec, adapters).items():
        tensors[name] = 0.1 * torch.randn(info.shape, generator=generator)
    at.mkdir()
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, at / "adapter_model.safetensors"
    )
    settings = {
        "peft_type": "LORA",
        "r": adapters.rank,
        "lora_alpha": adapters.scale * adapters.rank,
        "target_modules": sorted(adapters.targets or adaptable(spec)),
        "fan_in_fan_out": spec.family.model_type == "gpt2",
    }
    (at / "adapter_config.json").write_text(json.dumps(settings))
    return tensors


def peft_state(directory: Path) -> dict[str, torch.Tensor]:
    """The adapters in a directory, by canonical name."""
    from safetensors.torch import load_file

    stored = load_file(directory / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor for name, tensor in stored.items()}
