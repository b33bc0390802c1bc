"""Checks a run's models without loading them: architectures, layouts, files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from megarl.config import Problem, RunConfig, SamplingConfig, TrainingConfig
from megarl.config.problems import shown
from megarl.config.schema import LoRA, PairData, TextData
from megarl.data.tokenizer import LARGEST_FILE, has_tokenizer
from megarl.decoder_fields import decoder_fields
from megarl.files import read_json
from megarl.models import ModelSpec, model_spec
from megarl.models.lora import adaptable, adapter_tensors, engines_apply_adapters, smallest_matrix, unknown_targets
from megarl.models.transformer_engine import refusals
from megarl.role_specs import adapters_of
from megarl.rollout.adapter_buffers import LARGEST_RANK
from megarl.types import HEADS, RoleName
from megarl.weights.hf_files import HFDirectory, read_config
from megarl.weights.peft_files import ADAPTER_FILE, peft_manifest, read_adapter_config
from megarl.weights.shard_map import Manifest

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on a CPU takes (0.28 to 0.32: v1/attention/backends/cpu_attn.py)."""
_CPU_LATENT = (512, 64)
"""Elements of latents and rotated ones of its latent attention on a CPU (0.32: ``cpu_mla.py``)."""
_CPU_EXPERT_STEP = 32
"""Step of the channels that its clamped experts on a CPU have (0.32: ``cpu_moe.py``); it pads others."""
_CPU_DELTA_DIMS = (64, 128)
"""Elements of heads that its gated delta nets on a CPU take (0.32: ``chunk_gated_delta_rule_cpu``)."""
_CPU_DELTA_WIDTH = 4
"""Positions of the convolutions that it packs there (0.32: ``layers/utils.py``)."""


def check_models(config: RunConfig, *, bare: bool = False) -> tuple[int | None, list[Problem]]:
    """Returns the number of ids that the run uses, None if unknown, and the problems of all models.

    Args:
        bare: whether to accept the models of `without_weights`.
    """
    problems: list[Problem] = []
    specs: dict[str, ModelSpec] = {}
    unchecked = without_weights(config) if bare else {}
    field = "model.random.config" if config.model.random else "model.path"
    model = _spec(problems, field, config.model.hf_config)
    if model is None:
        vocab = _stated_vocab_size(config)
    else:
        specs["model"] = model
        vocab = model.ids_in_use(config.model.vocab_size)
        problems += _model(config, model)
        if config.model.path is not None and "model.path" not in unchecked:
            problems += _files("model.path", config.model.path, model.manifest())
    for field, (role, path) in _role_checkpoints(config).items():
        spec = _spec(problems, field, partial(read_config, path))
        if spec is not None:
            specs[field.removesuffix(".path")] = spec
            problems += _role_checkpoint(field, role, path, spec, weights=field not in unchecked)
        problems += _same_tokenizer(config, field, path)
    problems += _judge(config)
    problems += _layouts(config, specs)
    problems += _positions(config, specs)
    if model is not None:
        problems += _attention(config, model)
        problems += _mixers(config, model)
    problems += _layers(config, specs)
    problems += _adapters(config, specs)
    return vocab, problems


def _stated_vocab_size(config: RunConfig) -> int | None:
    """Returns the vocabulary size that a configuration states of an unsupported model, if any."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    try:
        stated = decoder_fields(config.model.hf_config()).get("vocab_size")
    except (OSError, ValueError):
        return None
    if isinstance(stated, int) and stated > 0:
        return stated
    return None


def without_weights(config: RunConfig) -> Mapping[str, str]:
    """Returns, by field, the directories that have a config.json and no weights."""
    paths = {"model.path": config.model.path}
    paths |= {field: path for field, (_, path) in _role_checkpoints(config).items()}
    bare: dict[str, str] = {}
    for field, path in paths.items():
        if path is None or not (Path(path) / "config.json").is_file():
            continue
        if not any(Path(path).glob("*.safetensors*")) and not any(Path(path).glob("*.bin*")):
            bare[field] = path
    return bare


def _role_checkpoints(config: RunConfig) -> dict[str, tuple[RoleName, str]]:
    """Returns the roles that do not start from the run's model, and their directories, by field.

    A draft model is checked as a reference: it has an LM head and the model's tokenizer.
    """
    paths: dict[str, tuple[RoleName, str]] = {}
    for group in config.groups.values():
        for role in group.roles:
            path = config.role_checkpoint(role)
            if path is not None:
                paths[f"{role}.path"] = role, path
    for teacher, path in config.teachers.items():
        paths[f"reference.teachers.{teacher}"] = "reference", path
    if config.engine_settings is not None and config.engine_settings.draft_model is not None:
        paths["rollout.draft_model"] = "reference", config.engine_settings.draft_model
    return paths


def _same_tokenizer(config: RunConfig, field: str, path: str) -> Iterator[Problem]:
    """If both directories have a tokenizer, a token id must mean the same text in both."""
    directory = config.model.tokenizer or config.model.path
    if directory is None:
        return
    expected = _vocabulary(Path(directory))
    found = _vocabulary(Path(path))
    if expected is not None and found is not None and expected != found:
        fix = "choose a checkpoint that was made with the model's tokenizer"
        prints = f"{_fingerprint(found)} must be {_fingerprint(expected)}"
        rule = f"its tokenizer must be the one of {directory}: {prints}"
        yield Problem(field, path, rule, fix)


def _vocabulary(directory: Path) -> Mapping[str, int] | None:
    try:
        return read_json(directory / "tokenizer.json", LARGEST_FILE)["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Returns the size of a vocabulary, and a digest of its tokens with their ids."""
    content = json.dumps(vocabulary, sort_keys=True).encode()
    return f"{len(vocabulary)} tokens {hashlib.sha256(content).hexdigest()[:12]}"


def _spec(problems: list[Problem], field: str, read: Callable[[], object]) -> ModelSpec | None:
    """Returns the spec of a config.json, or None after adding a problem."""
    try:
        return model_spec(read())  # pyright: ignore[reportArgumentType]  (fields of a config.json)
    except (OSError, ValueError) as error:
        fix = "correct or complete the model's configuration, or choose another model"
        problems.append(Problem(field, "unsupported", _one_line(error), fix))
        return None


def _model(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    if isinstance(config, TrainingConfig):
        yield from _trainable("model", spec)
    if config.model.random is not None and spec.family.has_text_config:
        rule = "a random model is a decoder alone"
        fix = "state the fields of its text_config, with their model_type and architectures"
        yield Problem("model.random.config", spec.family.model_type, rule, fix)
    if spec.head != "lm":
        fix = "choose a language model's checkpoint"
        yield Problem("model.path", shown(config.model.path), "a model with an LM head", fix)
    if (config.model.vocab_size or 0) > spec.dims.vocab:
        value = str(config.model.vocab_size)
        rule = f"at most the {spec.dims.vocab} ids that the model has"
        yield Problem("model.vocab_size", value, rule, "lower it, or set it to null")


def _trainable(field: str, spec: ModelSpec) -> Iterator[Problem]:
    if spec.dtype == "float16":
        rule = "training in float16 would need a loss scale, which is not supported"
        fix = "set dtype to bfloat16 or float32 in the model's config.json"
        yield Problem(field, "dtype float16", rule, fix)


def _role_checkpoint(field: str, role: RoleName, path: str, spec: ModelSpec, *, weights: bool) -> Iterator[Problem]:
    """A reward model needs a score head, a teacher an LM head; a critic starts from any body."""
    if role == "critic":
        yield from _trainable(field, spec)
    head = HEADS[role]
    if role == "reward":
        from megarl.rewards.model_files import read_scale  # imports torch

        try:
            read_scale(path)
        except (OSError, ValueError) as error:
            rule = f"a checkpoint whose scale can be read: {error}"
            fix = "export the checkpoint again"
            yield Problem(field, path, rule, fix)
    if role != "critic" and spec.head != head:
        kind = {"reward": "reward", "reference": "language"}[role]
        rule = f"a model with a {head} head"
        yield Problem(field, path, rule, f"choose a {kind} model's checkpoint")
    elif weights:
        yield from _files(field, path, spec.manifest(head, new_head=head == "value"))


def _files(field: str, path: str, needed: Manifest) -> Iterator[Problem]:
    """Compares the tensors in the headers of a checkpoint's files with those of the model."""
    try:
        HFDirectory(path).check(needed)
    except (OSError, ValueError, KeyError) as error:
        rule = f"a checkpoint whose files fit its config.json: {_one_line(error)}"
        yield Problem(field, path, rule, "download or export the checkpoint again")


def _layouts(config: RunConfig, specs: Mapping[str, ModelSpec]) -> Iterator[Problem]:
    """Finds layouts that the models do not fit."""
    for group_name, group in config.groups.items():
        for role, sizes in group.roles.items():
            names = ["model" if config.role_checkpoint(role) is None else role]
            if role == "reference" and config.teachers:
                names = [f"reference.teachers.{teacher}" for teacher in config.teachers]
            field = f"groups.{group_name}.roles.{role}"
            for model in [specs[name] for name in names if name in specs]:
                yield from _fits(field, lambda model=model, role=role: model.check_megatron(config.layout(role)))
                if model.dims.experts and sizes.tp > 1 and not sizes.sequence_parallel:
                    # Ranks of a TP group send different tokens to the experts only with sequence parallelism.
                    rule = "a mixture of experts with tp above 1 needs sequence_parallel"
                    fix = "set it to true, or tp to 1"
                    yield Problem(f"{field}.sequence_parallel", "False", rule, fix)
    rollout = config.engine_settings
    if rollout is None:
        return
    engine_models = [specs[name] for name in ("model", "rollout.draft_model") if name in specs]
    for spec in engine_models:
        yield from _fits("rollout.tp", partial(spec.check_vllm, rollout.tp))
    sizes = [spec.dims.vocab for spec in engine_models]
    if len(set(sizes)) > 1:
        rule = f"a model of {sizes[0]} token ids, as the model that it drafts for; it has {sizes[1]}"
        yield Problem("rollout.draft_model", str(rollout.draft_model), rule, "choose another")


def _longrope(config: RunConfig, spec: ModelSpec, lengths: Mapping[str, int]) -> Iterator[Problem]:
    """vLLM chooses the factors of longrope by the positions of an engine, and trainers do as it does."""
    rollout = config.engine_settings
    if rollout is None or spec.rope is None or spec.rope.kind != "longrope":
        return
    original = spec.rope.original or 0
    room = rollout.positions - rollout.max_model_len
    if rollout.max_model_len <= original < rollout.positions:
        value = str(rollout.max_model_len)
        rule = f"engines have {rollout.positions} positions, for which longrope takes other factors than for {original}"
        fix = f"set it to {original - room} or less, or above {original}"
        yield Problem("rollout.max_model_len", value, rule, fix)
    for field, length in lengths.items():
        if length > original >= rollout.positions:
            rule = f"engines of {rollout.positions} positions take longrope's factors for up to {original}"
            fix = f"lower it, or raise rollout.max_model_len above {original}"
            yield Problem(field, str(length), rule, fix)


def _positions(config: RunConfig, specs: Mapping[str, ModelSpec]) -> Iterator[Problem]:
    """The models have positions for the longest sequence."""
    lengths: dict[str, int] = {}
    if config.engine_settings is not None:
        lengths["rollout.max_model_len"] = config.engine_settings.max_model_len
    _, rows = config.rows_section
    if isinstance(rows, TextData | PairData):
        lengths["data.max_tokens"] = rows.max_tokens
    if isinstance(config, SamplingConfig) and config.mixed_texts is not None:
        lengths["ptx.max_tokens"] = config.mixed_texts.max_tokens
    for name, spec in specs.items():
        yield from _longrope(config, spec, lengths)
        for field, length in lengths.items():
            if length > spec.dims.positions:
                rule = f"at most the {spec.dims.positions} positions of the {name}"
                yield Problem(field, str(length), rule, f"set it to {spec.dims.positions} or less")
    rollout = config.engine_settings
    if rollout is None or not rollout.speculative:
        return
    known = [specs[name].dims.positions for name in ("model", "rollout.draft_model") if name in specs]
    positions = min(known, default=0)
    room = max(0, positions - rollout.max_model_len) // 2
    if known and room < rollout.speculative:
        rule = f"max_model_len and twice the drafts are at most the {positions} positions of the model"
        fix = f"set it to {room}, or lower rollout.max_model_len"
        yield Problem("rollout.speculative", str(rollout.speculative), rule, fix)


def _attention(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    """vLLM on a CPU has attention kernels for some head sizes; others fail at the first call."""
    if config.engine_settings is None or config.cluster.device != "cpu":
        return
    mla = spec.dims.mla
    if mla is not None:
        found = (mla.latent, mla.rotated)
        if found != _CPU_LATENT:
            rule = f"vLLM on a CPU takes kv_lora_rank, qk_rope_head_dim of {_CPU_LATENT}; these are {found}"
            yield Problem("cluster.device", "cpu", rule, "choose another model, or device cuda")
        return
    if spec.dims.head_dim not in _CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, _CPU_HEAD_SIZES))
        rule = f"vLLM on a CPU takes attention heads of {sizes}; the model's have {spec.dims.head_dim}"
        yield Problem("cluster.device", "cpu", rule, "choose a model with such heads, or device cuda")


def _mixers(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    """Finds what engines do not support with gated delta nets and with latent attention."""
    rollout = config.engine_settings
    if rollout is None:
        return
    for sizes, what in ((spec.dims.delta, "gated delta nets"), (spec.dims.mla, "latent attention")):
        if sizes is None:
            continue
        if rollout.speculative:
            rule = f"drafts are not supported for models with {what}"
            yield Problem("rollout.speculative", str(rollout.speculative), rule, "set it to 0")
        if rollout.quantization is not None:
            rule = f"models with {what} are not quantised"
            yield Problem("rollout.quantization", rollout.quantization, rule, "set it to null")
    yield from _delta_kernels(config, spec)
    yield from _stacked_experts(config, spec)


def _stacked_experts(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    """Finds what engines do not support with gpt-oss' experts; some would start with random ones."""
    rollout = config.engine_settings
    if rollout is None or not spec.table.has_stacked_experts:
        return
    if rollout.quantization is not None:
        # Its loader copies into parameters that have no memory yet (0.32), and says nothing.
        rule = f"experts of {spec.family.model_type} are not quantised"
        yield Problem("rollout.quantization", rollout.quantization, rule, "set it to null")
    channels = spec.dims.expert_ffn // rollout.tp
    if config.cluster.device == "cpu" and channels % _CPU_EXPERT_STEP:
        rule = f"vLLM on a CPU takes multiples of {_CPU_EXPERT_STEP} channels of an expert, and a rank has {channels}"
        yield Problem("rollout.tp", str(rollout.tp), rule, "choose another number, or device cuda")


def _delta_kernels(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    """Finds sizes of gated delta nets for which vLLM on a CPU has no kernels.

    They would fail at the first call, or read unpacked weights as packed ones.
    """
    delta = spec.dims.delta
    if delta is None or config.cluster.device != "cpu":
        return
    problems: list[str] = []
    if spec.dtype != "bfloat16":
        problems.append(f"compute in bfloat16 alone; the model's dtype is {spec.dtype}")
    dims = {delta.key_dim, delta.value_dim}
    if dims - set(_CPU_DELTA_DIMS):
        stated = " and ".join(map(str, sorted(dims)))
        problems.append(f"take heads of {' and '.join(map(str, _CPU_DELTA_DIMS))}; the model's have {stated}")
    if delta.width != _CPU_DELTA_WIDTH:
        problems.append(
            f"take convolutions of {_CPU_DELTA_WIDTH} positions; the model's have {delta.width}",
        )
    for problem in problems:
        rule = f"vLLM's gated delta nets on a CPU {problem}"
        yield Problem("cluster.device", "cpu", rule, "choose another model, or device cuda")


def _judge(config: RunConfig) -> list[Problem]:
    """A judge is a language model with a tokenizer."""
    judge = config.judge_model
    if judge is None:
        return []
    found: list[Problem] = []
    spec = _spec(found, "reward.judge_model.path", partial(read_config, judge.path))
    if spec is not None:
        found += _files("reward.judge_model.path", judge.path, spec.manifest())
        found += _fits("reward.judge_model.tp", partial(spec.check_vllm, judge.tp))
        found += _delta_kernels(config, spec)
    if not has_tokenizer(judge.path):
        rule = "a directory with a tokenizer, too"
        fix = "choose another one, or add tokenizer.json"
        found.append(Problem("reward.judge_model.path", judge.path, rule, fix))
    return found


def _layers(config: RunConfig, specs: Mapping[str, ModelSpec]) -> Iterator[Problem]:
    """Transformer Engine's layers can compute every model of which they are wanted."""
    if config.model.layers != "transformer_engine":
        return
    for name, spec in specs.items():
        if reasons := refusals(spec.dims, spec.table.kinds, spec.dtype):
            rule = f"Transformer Engine must be able to compute the {name}: {'; '.join(reasons)}"
            fix = "set it to auto, which takes Megatron's own layers then"
            yield Problem("model.layers", "transformer_engine", rule, fix)


def _adapters(config: RunConfig, specs: Mapping[str, ModelSpec]) -> Iterator[Problem]:
    """Adapters fit their models, and those to start from are of the same kind."""
    if not isinstance(config, TrainingConfig):
        return
    for role in config.trained:
        lora = config.lora(role)
        if lora is None:
            continue
        field = f"{role}.lora"
        if config.model.layers == "transformer_engine":
            rule = f"must be auto or local with {field}: adapters are in Megatron's own layers"
            yield Problem("model.layers", "transformer_engine", rule, "set it to auto")
        spec = specs.get(role if config.role_checkpoint(role) is not None else "model")
        if spec is None:
            continue
        adapters = adapters_of(lora)
        unknown = unknown_targets(spec, adapters)
        if unknown:
            known = ", ".join(sorted(adaptable(spec)))
            rule = f"names of the model's linear layers: {known}"
            yield Problem(
                f"{field}.targets",
                ", ".join(unknown),
                rule,
                "choose some of these, or all-linear",
            )
            continue
        name, size = smallest_matrix(spec, adapters)
        if lora.rank > size:
            rule = f"at most {size}, the smaller side of {name}"
            yield Problem(
                f"{field}.rank",
                str(lora.rank),
                rule,
                f"lower it, or leave {name} out of {field}.targets",
            )
        elif lora.path is not None:
            yield from _stored_adapters(f"{field}.path", lora, spec)
        if config.separate_adapters is lora:
            yield from _separate(field, lora, spec)


def _separate(field: str, lora: LoRA, spec: ModelSpec) -> Iterator[Problem]:
    """Engines can apply adapters of the model, of this rank."""
    if not engines_apply_adapters(spec):
        rule = f"merged with the {spec.family.model_type} model, of which engines take merged weights alone"
        yield Problem("resharding.adapters", "separate", rule, "set it to merged")
    if lora.rank > LARGEST_RANK:
        rule = f"at most {LARGEST_RANK} with resharding.adapters = separate, which vLLM takes"
        yield Problem(
            f"{field}.rank",
            str(lora.rank),
            rule,
            "lower it, or set resharding.adapters to merged",
        )


def _stored_adapters(field: str, lora: LoRA, spec: ModelSpec) -> Iterator[Problem]:
    """A directory of adapters in PEFT's format has those of the configuration, and belongs to the model."""
    path = str(lora.path)
    fix = "choose another directory, or change these settings"
    try:
        stored = read_adapter_config(path)
        for name, wanted in {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}.items():
            found = stored.get(name, False)
            if found != wanted:
                yield Problem(field, path, f"its {name} is {shown(found)}, and {shown(wanted)} here", fix)
                return
        tensors = adapter_tensors(spec, adapters_of(lora))
        HFDirectory(path, ADAPTER_FILE).check(peft_manifest(tensors))
    except (OSError, ValueError) as error:
        rule = f"adapters in PEFT's format that fit the model and the targets: {_one_line(error)}"
        yield Problem(field, path, rule, fix)


def _fits(field: str, check_layout: Callable[[], None]) -> Iterator[Problem]:
    try:
        check_layout()
    except ValueError as error:
        fix = "choose sizes that divide the model"
        yield Problem(field, "layout", _one_line(error), fix)


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines()).replace(":; ", ": ")
