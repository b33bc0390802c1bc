"""Rules of models: they exist, are of a supported kind, and can be split as the layouts ask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def size_field(hf: Mapping[str, Any], size: SizeName) -> str | None:
    """Returns the field of a config.json for a size; None for the experts of a model that has none."""
    field = _OTHER_FIELDS.get(str(hf.get("model_type")), {}).get(size) or _FIELDS.get(size)
    if field == "num_experts" and field not in hf and "num_local_experts" in hf:
        return "num_local_experts"  # as transformers 5 writes it
    return field


def size_of(hf: Mapping[str, Any], size: SizeName) -> tuple[str, int] | None:
    """Returns the field of a size and its value; None if that is not a number above 0."""
    field = size_field(hf, size)
    if field is None:
        return None
    value = hf.get(field)
    if isinstance(value, int) and value > 0:
        return field, value
    return None


def required_fields(hf: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a config.json that give the sizes; GPT-2 derives its ffn."""
    required = ["model_type", "vocab_size"]
    sizes: tuple[SizeName, ...] = ("hidden", "ffn", "layers", "heads", "experts")
    for size in sizes:
        field = size_field(hf, size)
        if field is not None and (hf.get("model_type"), size) != ("gpt2", "ffn"):
            required.append(field)
    return required


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
    paths = _checkpoints(reward, critic)
    if model.path is not None:
        paths["model"] = model.path
    for name, path in paths.items():
        try:
            read_hf_config(path)
        except (OSError, ValueError) as error:
            rule = f"a directory with a readable config.json ({getattr(error, 'strerror', None) or error})"
            yield Problem(f"{name}.path", path, rule, correct_model_path(path))


def architecture_is_known(model: Model) -> Iterator[Problem]:
    """The model's config.json is complete, and its model_type is supported."""
    hf = readable_config(model)
    if hf is None:
        return
    where = "model.path" if model.random is None else "model.random.config"
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
    """tp divides the heads and the ffn, ep the experts; every pipeline stage and chunk has a layer."""
    for field, role, hf in _placed_models(model, groups, reward, critic):
        yield from _tp_divides(f"{field}.tp", role.tp, hf)
        stages = role.pp * role.vpp
        layers = size_of(hf, "layers")
        if layers is not None and stages > layers[1]:
            rule = f"pp * vpp = {stages} is at most the model's {layers[0]} = {layers[1]}"
            yield Problem(f"{field}.pp", str(role.pp), rule, "choose a smaller pp or vpp")
        experts = size_of(hf, "experts")
        if experts is None and role.ep > 1:
            rule = f"ep above 1 needs a mixture of experts; the model is of kind {hf.get('model_type')}"
            yield Problem(f"{field}.ep", str(role.ep), rule, "set it to 1")
        yield from _divides(f"{field}.ep", role.ep, experts)
        if experts is not None and role.tp > 1 and not role.sequence_parallel:
            # Ranks of a TP group send different tokens to the experts only with sequence parallelism.
            rule = "a mixture of experts with tp above 1 needs sequence_parallel"
            fix = "set it to true, or tp to 1"
            yield Problem(f"{field}.sequence_parallel", "False", rule, fix)


def engines_split_the_model(model: Model, rollout: Rollout | None) -> Iterator[Problem]:
    """The engines' tp divides the heads and the ffn."""
    hf = readable_config(model)
    if hf is not None and rollout is not None:
        yield from _tp_divides("rollout.tp", rollout.tp, hf)


def fused_layers_need_a_gpu(model: Model, cluster: Cluster) -> Iterator[Problem]:
    """Transformer Engine has no layers for a CPU."""
    if model.layers == "transformer_engine" and cluster.device == "cpu":
        rule = "Transformer Engine needs device cuda; on a CPU, layers are Megatron's own"
        yield Problem("model.layers", model.layers, rule, "set it to auto or local")


def engines_have_an_attention_kernel(model: Model, cluster: Cluster, rollout: Rollout | None) -> Iterator[Problem]:
    """vLLM on a CPU has attention kernels for some head sizes alone."""
    hf = readable_config(model)
    if hf is None or rollout is None or cluster.device != "cpu":
        return
    heads = size_of(hf, "heads")
    hidden = size_of(hf, "hidden")
    if heads is None or hidden is None:
        return
    size = hf.get("head_dim") or hidden[1] // heads[1]
    if size not in _CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, _CPU_HEAD_SIZES))
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
    for role, path in _checkpoints(reward, critic).items():
        configs[f"{role}.path"] = _read(path)
    lengths: dict[str, int] = {}
    if rollout is not None:
        lengths["rollout.max_model_len"] = rollout.max_model_len
    if isinstance(data, TextData | PairData):
        lengths["data.max_tokens"] = data.max_tokens
    if ptx is not None:
        lengths["ptx.max_tokens"] = ptx.max_tokens
    for whose, hf in configs.items():
        positions = size_of(hf or {}, "positions")
        if positions is None:
            continue
        for field, length in lengths.items():
            if length > positions[1]:
                rule = f"at most {whose}'s {positions[0]} = {positions[1]}"
                yield Problem(field, str(length), rule, f"set it to {positions[1]} or less")


def checkpoints_share_the_tokens(model: Model, reward: Reward, critic: Critic | None) -> Iterator[Problem]:
    """The reward model and the critic have every token id that the actor uses."""
    used = ids_in_use(model)
    for role, path in _checkpoints(reward, critic).items():
        size = (_read(path) or {}).get("vocab_size")
        if used is None or not isinstance(size, int) or size >= used:
            continue
        rule = f"knows the {used} token ids in use; it has {size}"
        fix = (
            f"choose a checkpoint with the model's tokenizer, or set model.vocab_size to {size}"
            " if ids from there on stand for nothing"
        )
        yield Problem(f"{role}.path", shown(path), rule, fix)


def _checkpoints(reward: Reward | RewardTraining | None, critic: Critic | None) -> dict[str, str]:
    """Returns the directories of the roles that do not start from the run's model."""
    paths: dict[str, str] = {}
    if isinstance(reward, Reward) and reward.path is not None:
        paths["reward"] = reward.path
    if critic is not None and critic.path is not None:
        paths["critic"] = critic.path
    return paths


def ids_in_use(model: Model) -> int | None:
    """Returns the number of token ids that may be sampled; None if it is unknown."""
    used = model.vocab_size or (readable_config(model) or {}).get("vocab_size")
    if isinstance(used, int):
        return used
    return None


def readable_config(model: Model) -> Mapping[str, Any] | None:
    """Returns the model's config.json; None if it cannot be read."""
    if model.random is not None and model.path is None:
        return model.random.config
    if model.path is not None and model.random is None:
        return _read(model.path)
    return None


def _read(path: str) -> Mapping[str, Any] | None:
    try:
        return read_hf_config(path)
    except (OSError, ValueError):
        return None  # reported by checkpoints_are_readable


def _placed_models(
    model: Model, groups: Groups, reward: Reward | RewardTraining | None, critic: Critic | None
) -> Iterator[tuple[str, RoleConfig, Mapping[str, Any]]]:
    """Yields (path of its field, its settings, config.json) of every role that has one."""
    paths = _checkpoints(reward, critic)
    for field, _, name, role in roles_of(groups):
        hf = _read(paths[name]) if name in paths else readable_config(model)
        if hf is not None:
            yield field, role, hf


def _tp_divides(field: str, tp: int, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """tp divides the heads and the ffn; several ranks may share a key-value head."""
    yield from _divides(field, tp, size_of(hf, "heads"))
    yield from _divides(field, tp, size_of(hf, "ffn"))
    kv_heads = size_of(hf, "kv_heads")
    if kv_heads is not None and kv_heads[1] % tp and tp % kv_heads[1]:
        rule = f"divides, or is a multiple of, the model's {kv_heads[0]} = {kv_heads[1]}"
        yield Problem(field, str(tp), rule, "choose another tp")


def _divides(field: str, parts: int, size: tuple[str, int] | None) -> Iterator[Problem]:
    if size is not None and size[1] % parts:
        rule = f"{field.rpartition('.')[2]} divides the model's {size[0]} = {size[1]}"
        yield Problem(field, str(parts), rule, f"choose a divisor of {size[1]}")
