"""What can be known of a run before anything starts: whether its models, layouts and prompts fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from megarl.config import ConfigError, PPOConfig, Problem
from megarl.config.problems import shown
from megarl.data.prompts import load_prompts, random_prompts
from megarl.data.tokenizer import model_tokenizer
from megarl.types import Prompt
from megarl.weights.files import CheckpointError, read_config
from megarl.weights.specs import ModelSpec, model_spec


def check(config: PPOConfig) -> list[Prompt]:
    """Checks a configuration against its models and prompts, which are read on the way.

    Returns:
        The prompts.

    Raises:
        ConfigError: the run could not be; every problem is listed.
    """
    problems: list[Problem] = []
    spec = _spec(problems, "model.random.config" if config.model.random else "model.path", config.model.hf_config)
    scorer, scorer_path = spec, config.reward.path
    if scorer_path is not None:
        scorer = _spec(problems, "reward.path", lambda: read_config(scorer_path))
    prompts: list[Prompt] = []
    if spec is not None:
        problems += _model(config, spec)
        problems += _layouts(config, spec, scorer)
    if scorer is not None and scorer_path is not None:
        problems += _scorer(scorer, scorer_path)
    if spec is not None and not problems:
        prompts = _prompts(problems, config, vocab_size(config, spec))
    replay = config.rollout.replay
    if replay is not None and not list(Path(replay).glob("*.npz")):
        fix = "name a directory that rollout.record wrote"
        problems.append(Problem(field="rollout.replay", value=replay, rule="holds recorded rollouts", fix=fix))
    if problems:
        raise ConfigError(problems)
    return prompts


def vocab_size(config: PPOConfig, spec: ModelSpec) -> int:
    """Token ids in use."""
    return config.model.vocab_size or spec.dims.vocab


def _spec(problems: list[Problem], field: str, read: Callable[[], object]) -> ModelSpec | None:
    try:
        return model_spec(read())  # pyright: ignore[reportArgumentType]  (fields of a config.json)
    except (ValueError, CheckpointError) as error:
        rule = "; ".join(line.strip() for line in str(error).splitlines())
        fix = "correct or complete the model's configuration, or choose another model"
        problems.append(Problem(field=field, value="unsupported", rule=rule, fix=fix))
        return None


def _model(config: PPOConfig, spec: ModelSpec) -> Iterator[Problem]:
    if spec.dtype == "float16":
        yield Problem(
            field="model",
            value="dtype float16",
            rule="training in float16 would need a loss scale, which is not supported",
            fix="set dtype to bfloat16 or float32 in the model's config.json",
        )
    if spec.head != "lm":
        fix = "choose a language model's checkpoint"
        yield Problem(field="model.path", value=shown(config.model.path), rule="a model with an LM head", fix=fix)
    if vocab_size(config, spec) > spec.dims.vocab:
        yield Problem(
            field="model.vocab_size",
            value=str(config.model.vocab_size),
            rule=f"at most the {spec.dims.vocab} ids that the model has",
            fix="lower it, or set it to null",
        )


def _layouts(config: PPOConfig, spec: ModelSpec, scorer: ModelSpec | None) -> Iterator[Problem]:
    """What the specs say of each layout; most of it was said by the rules of the configuration already."""
    for group_name, group in config.groups.items():
        for role in group.roles:
            own = scorer if role == "reward" else spec
            if own is not None:
                field = f"groups.{group_name}.roles.{role}"
                yield from _fits(field, lambda own=own, role=role: own.check_megatron(config.layout(role)))
    yield from _fits("rollout.tp", lambda: spec.check_vllm(config.rollout.tp))


def _fits(field: str, check_layout: Callable[[], None]) -> Iterator[Problem]:
    try:
        check_layout()
    except ValueError as error:
        fix = "choose sizes that divide the model"
        yield Problem(field=field, value="layout", rule=str(error), fix=fix)


def _scorer(scorer: ModelSpec, path: str) -> Iterator[Problem]:
    if scorer.head != "score":
        fix = "choose a reward model's checkpoint, or set it to null for a random head on the model"
        yield Problem(field="reward.path", value=path, rule="a model with a score head", fix=fix)


def _prompts(problems: list[Problem], config: PPOConfig, vocab: int) -> list[Prompt]:
    """The prompts; each must leave room for the response, and they must fill a step."""
    made, source, data = config.data.random, config.data.prompts, config.data
    if source is None:
        assert made is not None
        return random_prompts(
            count=made.count,
            min_tokens=made.min_tokens,
            max_tokens=made.max_tokens,
            vocab_size=vocab,
            seed=made.seed,
        )
    try:
        prompts, _ = load_prompts(
            source,
            model_tokenizer(config.model),
            vocab_size=vocab,
            chat_template=data.chat_template,
            max_tokens=config.rollout.max_model_len - config.rollout.max_new_tokens,
            too_long=data.too_long,
        )
    except (OSError, ValueError) as error:
        fix = "correct the rows, or name others; of rows that are too long (rollout.max_model_len less "
        fix += "rollout.max_new_tokens), see data.too_long"
        problems.append(Problem(field="data.prompts", value=source.path, rule=str(error), fix=fix))
        return []
    if len(prompts) < data.prompts_per_step:
        rule = f"at most the {len(prompts)} prompts of {source.path}"
        fix = "lower it, or add prompts"
        field = "data.prompts_per_step"
        problems.append(Problem(field=field, value=str(data.prompts_per_step), rule=rule, fix=fix))
    return prompts
