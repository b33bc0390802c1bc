"""Rules of models: they exist, are of a supported kind, and can be split as the layouts ask."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.config.problems import Problem, correct_model_path, shown
from megarl.config.rules.placement_rules import roles_of
from megarl.config.schema import (
    PTX,
    Cluster,
    Critic,
    Groups,
    Model,
    PairData,
    PromptData,
    Reward,
    RewardTraining,
    RoleConfig,
    Rollout,
    TextData,
    read_hf_config,
)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "mixtral", "qwen3_moe")

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on a CPU takes (0.28 to 0.32: v1/attention/backends/cpu_attn.py)."""

SizeName = Literal["layers", "heads", "kv_heads", "hidden", "ffn", "positions", "experts"]

_FIELDS: Mapping[SizeName, str] = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "positions": "max_position_embeddings",
}
"""The usual field of a config.json for each size. A model without a field for its experts has none."""

_OTHER_FIELDS: Mapping[str, Mapping[SizeName, str]] = {
    "gpt2": {"layers": "n_layer", "heads": "n_head", "hidden": "n_embd", "ffn": "n_inner", "positions": "n_positions"},
    "mixtral": {"experts": "num_local_experts"},
    "qwen3_moe": {"experts": "num_experts", "ffn": "moe_intermediate_size"},
}
"""The fields of a model_type that have other names."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size of a model, and the field of its config.json."""

    field: str
    value: int


def size_field(hf: Mapping[str, Any], size: SizeName) -> str | None:
    """Returns the field of a config.json for a size; None for the experts of a model that has none."""
    field = _OTHER_FIELDS.get(str(hf.get("model_type")), {}).get(size) or _FIELDS.get(size)
    # transformers from 5 on writes num_experts under the other name.
    renamed = field == "num_experts" and field not in hf and "num_local_experts" in hf
    return "num_local_experts" if renamed else field


def size_of(hf: Mapping[str, Any], size: SizeName) -> Size | None:
    """Returns a size as a config.json gives it; None if it is not a number above 0."""
    field = size_field(hf, size)
    value = None if field is None else hf.get(field)
    return Size(field=field, value=value) if field is not None and isinstance(value, int) and value > 0 else None


def required_fields(hf: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a config.json that the sizes of the model are read from; GPT-2 derives its ffn."""
    sizes: tuple[SizeName, ...] = ("hidden", "ffn", "layers", "heads", "experts")
    fields = [size_field(hf, size) for size in sizes if (hf.get("model_type"), size) != ("gpt2", "ffn")]
    return ["model_type", "vocab_size", *filter(None, fields)]


def one_model_source(model: Model) -> Iterator[Problem]:
    """The model is a checkpoint or random."""
    if (model.path is None) == (model.random is None):
        given = "neither" if model.path is None else "both"
        fix = "give model.path, or model.random, and set the other to null"
        yield Problem("model", given, "exactly one of path and random is given", fix)


def checkpoints_are_readable(
    model: Model, reward: Reward | RewardTraining | None, critic: Critic | None
) -> Iterator[Problem]:
    """Every checkpoint directory has a readable config.json."""
    paths = {"model.path": model.path, "reward.path": _path(reward), "critic.path": _path(critic)}
    for field, path in paths.items():
        if path is None:
            continue
        try:
            read_hf_config(path)
        except (OSError, ValueError) as error:
            rule = f"a directory with a readable config.json ({getattr(error, 'strerror', None) or error})"
            yield Problem(field, path, rule, correct_model_path(path))


def architecture_is_known(model: Model) -> Iterator[Problem]:
    """The model's config.json is complete, and its model_type is supported."""
    hf = readable_config(model)
    if hf is None:
        return
    where = "model.random.config" if model.random is not None else "model.path"
    for key in required_fields(hf):
        if hf.get(key) is None:
            yield Problem(f"{where}.{key}", "(missing)", "required", "add it to the model's config")
    kind = hf.get("model_type", MODEL_TYPES[0])
    if kind not in MODEL_TYPES:
        rule = f"one of {', '.join(MODEL_TYPES)}"
        fix = "this family is not supported yet; docs/weights.md lists the supported ones"
        yield Problem(f"{where}.model_type", shown(kind), rule, fix)


def layouts_split_the_model(
    model: Model, groups: Groups, reward: Reward | RewardTraining | None, critic: Critic | None
) -> Iterator[Problem]:
    """tp divides the heads and the ffn; every pipeline stage and chunk has a layer."""
    for field, role, hf in _models_of(model, groups, reward, critic):
        yield from _split_by_tp(f"{field}.tp", role.tp, hf)
        stages = role.pp * role.vpp
        layers = size_of(hf, "layers")
        if layers is not None and stages > layers.value:
            rule = f"pp * vpp = {stages} is at most the model's {layers.field} = {layers.value}"
            yield Problem(f"{field}.pp", str(role.pp), rule, "choose a smaller pp or vpp")


def experts_are_split(
    model: Model, groups: Groups, reward: Reward | RewardTraining | None, critic: Critic | None
) -> Iterator[Problem]:
    """ep divides the number of experts."""
    for field, role, hf in _models_of(model, groups, reward, critic):
        experts = size_of(hf, "experts")
        if experts is None and role.ep > 1:
            rule = f"ep above 1 needs a mixture of experts; the model is of kind {hf.get('model_type')}"
            yield Problem(f"{field}.ep", str(role.ep), rule, "set it to 1")
        yield from _split(f"{field}.ep", role.ep, "ep", experts, role.ep)


def experts_need_sequence_parallel(
    model: Model, groups: Groups, reward: Reward | RewardTraining | None, critic: Critic | None
) -> Iterator[Problem]:
    """Ranks of a TP group send different tokens to the experts only with sequence parallelism."""
    for field, role, hf in _models_of(model, groups, reward, critic):
        if role.tp > 1 and not role.sequence_parallel and size_of(hf, "experts") is not None:
            rule = "a mixture of experts with tp above 1 needs sequence_parallel"
            fix = "set it to true, or tp to 1"
            yield Problem(f"{field}.sequence_parallel", "False", rule, fix)


def engines_split_the_model(model: Model, rollout: Rollout | None) -> Iterator[Problem]:
    """The engines' tp divides the heads and the ffn."""
    hf = readable_config(model)
    if hf is not None and rollout is not None:
        yield from _split_by_tp("rollout.tp", rollout.tp, hf)


def fused_layers_need_a_gpu(model: Model, cluster: Cluster) -> Iterator[Problem]:
    """Transformer Engine has no layers for a CPU."""
    if model.layers == "transformer_engine" and cluster.device == "cpu":
        rule = "Transformer Engine needs device cuda; on a CPU, layers are Megatron's own"
        yield Problem("model.layers", model.layers, rule, "set it to auto or local")


def engines_have_an_attention_kernel(model: Model, cluster: Cluster, rollout: Rollout | None) -> Iterator[Problem]:
    """vLLM on a CPU has attention kernels for some head sizes; with another one, the first generation fails."""
    hf = readable_config(model)
    if hf is None or rollout is None or cluster.device != "cpu":
        return
    heads = size_of(hf, "heads")
    hidden = size_of(hf, "hidden")
    if heads is None or hidden is None:
        return
    size = hf.get("head_dim") or hidden.value // heads.value
    sizes = ", ".join(map(str, _CPU_HEAD_SIZES))
    if size not in _CPU_HEAD_SIZES:
        rule = f"vLLM on a CPU takes attention heads of {sizes}; the model's have {size}"
        yield Problem("cluster.device", "cpu", rule, "choose a model with such heads, or device cuda")


def positions_cover_lengths(
    model: Model,
    rollout: Rollout | None,
    data: TextData | PairData | PromptData | None,
    ptx: PTX | None,
    reward: Reward | RewardTraining | None,
    critic: Critic | None,
) -> Iterator[Problem]:
    """The models have positions for the longest sequence."""
    configs = {"the model": readable_config(model)}
    for field, path in (("reward.path", _path(reward)), ("critic.path", _path(critic))):
        configs[field] = None if path is None else _read(path)
    lengths: dict[str, int] = {}
    if rollout is not None:
        lengths["rollout.max_model_len"] = rollout.max_model_len
    if isinstance(data, TextData | PairData):
        lengths["data.max_tokens"] = data.max_tokens
    if ptx is not None:
        lengths["ptx.max_tokens"] = ptx.max_tokens
    for (whose, hf), (field, length) in itertools.product(configs.items(), lengths.items()):
        positions = None if hf is None else size_of(hf, "positions")
        if positions is not None and length > positions.value:
            rule = f"at most {whose}'s {positions.field} = {positions.value}"
            yield Problem(field, str(length), rule, f"set it to {positions.value} or less")


def checkpoints_share_the_tokens(model: Model, reward: Reward, critic: Critic | None) -> Iterator[Problem]:
    """The reward model and the critic have every token id that the actor uses."""
    used = ids_in_use(model)
    for field, path in (("reward.path", _path(reward)), ("critic.path", _path(critic))):
        other = None if path is None else _read(path)
        size = None if other is None else other.get("vocab_size")
        if used is None or not isinstance(size, int) or size >= used:
            continue
        rule = f"knows the {used} token ids in use; it has {size}"
        unused = "ids from there on stand for nothing"
        fix = f"choose a checkpoint with the model's tokenizer, or set model.vocab_size to {size} if {unused}"
        yield Problem(field, shown(path), rule, fix)


def _path(section: Reward | RewardTraining | Critic | None) -> str | None:
    return section.path if isinstance(section, Reward | Critic) else None


def ids_in_use(model: Model) -> int | None:
    """Returns the number of token ids that may be sampled; None if the model's config.json does not say."""
    used = model.vocab_size or (readable_config(model) or {}).get("vocab_size")
    return used if isinstance(used, int) else None


def readable_config(model: Model) -> Mapping[str, Any] | None:
    """Returns the model's config.json; None if it cannot be read."""
    if model.random is not None:
        return model.random.config if model.path is None else None
    return None if model.path is None else _read(model.path)


def _read(path: str) -> Mapping[str, Any] | None:
    try:
        return read_hf_config(path)
    except (OSError, ValueError):
        return None  # reported by checkpoints_are_readable


def _models_of(
    model: Model, groups: Groups, reward: Reward | RewardTraining | None, critic: Critic | None
) -> Iterator[tuple[str, RoleConfig, Mapping[str, Any]]]:
    """Yields every placed role whose config.json can be read, as (path of its field, its settings, config.json)."""
    paths = {"reward": _path(reward), "critic": _path(critic)}
    for field, _, name, role in roles_of(groups):
        path = paths.get(name)
        hf = readable_config(model) if path is None else _read(path)
        if hf is not None:
            yield field, role, hf


def _split_by_tp(field: str, tp: int, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """tp divides the heads and the ffn; several ranks may share a key-value head."""
    for what in ("heads", "ffn"):
        yield from _split(field, tp, "tp", size_of(hf, what), tp)
    kv_heads = size_of(hf, "kv_heads")
    if kv_heads is not None and kv_heads.value % tp and tp % kv_heads.value:
        rule = f"divides, or is a multiple of, the model's {kv_heads.field} = {kv_heads.value}"
        yield Problem(field, str(tp), rule, "choose another tp")


def _split(field: str, value: int, what: str, whole: Size | None, parts: int) -> Iterator[Problem]:
    if whole is not None and whole.value % parts:
        rule = f"{what} divides the model's {whole.field} = {whole.value}"
        yield Problem(field, str(value), rule, f"choose a divisor of {whole.value}")
