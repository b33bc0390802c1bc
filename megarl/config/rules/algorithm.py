"""What the algorithm needs, and the arithmetic of batches and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.problems import Problem
from megarl.config.rules.placement import roles_of
from megarl.config.schema import Algo, Group, PromptData, Reward, Rollout
from megarl.types import RoleName

Groups = Mapping[str, Group]


def _placed(groups: Groups, role: RoleName) -> bool:
    return any(role in group.roles for group in groups.values())


def advantages_have_a_critic(algo: Algo, groups: Groups) -> Iterator[Problem]:
    """GAE needs values."""
    if algo.advantage == "gae" and not _placed(groups, "critic"):
        fix = "add critic to the roles of a group"
        yield Problem(field="algo.advantage", value="gae", rule="needs the role critic", fix=fix)


def penalty_has_a_reference(algo: Algo, groups: Groups) -> Iterator[Problem]:
    """A penalty needs a reference, and a reference without a penalty would run for nothing."""
    placed = _placed(groups, "reference")
    if algo.kl.coef > 0 and not placed:
        fix = "add reference to the roles of a group, or set algo.kl.coef to 0"
        yield Problem(field="algo.kl.coef", value=str(algo.kl.coef), rule="needs the role reference", fix=fix)
    if algo.kl.coef == 0 and placed:
        fix = "remove the role reference from its group, or set algo.kl.coef above 0"
        rule = "above 0 where the role reference is placed; it has no effect otherwise"
        yield Problem(field="algo.kl.coef", value="0", rule=rule, fix=fix)


def scores_have_a_source(groups: Groups, reward: Reward) -> Iterator[Problem]:
    """Something scores the responses, and a head's initialisation is given for a random head alone."""
    if not _placed(groups, "reward"):
        fix = "add reward to the roles of a group"
        yield Problem(field="groups", value=", ".join(groups), rule="a group has the role reward", fix=fix)
    untouched = Reward()
    for name in ("head_std", "head_seed"):
        if reward.path is not None and getattr(reward, name) != getattr(untouched, name):
            yield Problem(
                field=f"reward.{name}",
                value=str(getattr(reward, name)),
                rule="has no effect with reward.path, whose head is loaded",
                fix=f"remove reward.{name}, or set reward.path to null",
            )


def one_prompt_source(data: PromptData) -> Iterator[Problem]:
    """Either a file or random prompts; a file exists, random lengths are in order, a step has enough prompts."""
    if (data.prompts is None) == (data.random is None):
        given = "neither" if data.prompts is None else "both"
        fix = "give data.prompts, or data.random, and set the other to null"
        yield Problem(field="data", value=given, rule="exactly one of prompts and random is given", fix=fix)
    if (
        data.prompts is not None
        and data.prompts.path.endswith((".jsonl", ".parquet"))
        and not Path(data.prompts.path).is_file()
    ):
        yield Problem(field="data.prompts", value=data.prompts.path, rule="a file that exists", fix="correct the path")
    if data.random is None:
        return
    if data.random.min_tokens > data.random.max_tokens:
        rule = f"at most data.random.max_tokens = {data.random.max_tokens}"
        value, fix = str(data.random.min_tokens), "lower it, or raise data.random.max_tokens"
        yield Problem(field="data.random.min_tokens", value=value, rule=rule, fix=fix)
    if data.random.count < data.prompts_per_step:
        rule = f"at least data.prompts_per_step = {data.prompts_per_step}"
        value, fix = str(data.random.count), "raise it, or lower data.prompts_per_step"
        yield Problem(field="data.random.count", value=value, rule=rule, fix=fix)


def mini_batches_are_equal(algo: Algo, data: PromptData) -> Iterator[Problem]:
    """Every optimizer step has the same number of samples."""
    samples = data.prompts_per_step * data.samples_per_prompt
    if samples % algo.mini_batches:
        yield Problem(
            field="algo.mini_batches",
            value=str(algo.mini_batches),
            rule=f"divides data.prompts_per_step * data.samples_per_prompt = {samples}",
            fix=f"choose a divisor of {samples}",
        )


def lengths_fit(data: PromptData, rollout: Rollout) -> Iterator[Problem]:
    """An engine can hold the longest prompt with the longest response."""
    prompt = 1 if data.random is None else data.random.max_tokens
    needed = prompt + rollout.max_new_tokens
    if rollout.max_model_len < needed:
        yield Problem(
            field="rollout.max_model_len",
            value=str(rollout.max_model_len),
            rule=f"covers a prompt ({prompt} tokens) and rollout.max_new_tokens = {rollout.max_new_tokens}",
            fix=f"set it to {needed} or more, or lower rollout.max_new_tokens",
        )


def micro_batches_hold_a_sample(groups: Groups, rollout: Rollout) -> Iterator[Problem]:
    """The longest sequence fits into one micro-batch."""
    for field, _, _, role in roles_of(groups):
        if role.tokens_per_micro_batch < rollout.max_model_len:
            yield Problem(
                field=f"{field}.tokens_per_micro_batch",
                value=str(role.tokens_per_micro_batch),
                rule=f"at least rollout.max_model_len = {rollout.max_model_len}",
                fix=f"set it to {rollout.max_model_len} or more, or lower rollout.max_model_len",
            )


def record_or_replay(rollout: Rollout) -> Iterator[Problem]:
    """Rollouts that are read back are not written again, and must exist."""
    if rollout.replay is None:
        return
    if rollout.record is not None:
        fix = "set one of them to null"
        yield Problem(field="rollout.record", value=rollout.record, rule="not together with rollout.replay", fix=fix)
    if not Path(rollout.replay).is_dir():
        fix = "correct the path, or make it with rollout.record"
        yield Problem(field="rollout.replay", value=rollout.replay, rule="a directory that exists", fix=fix)


RULES = (
    advantages_have_a_critic,
    penalty_has_a_reference,
    scores_have_a_source,
    one_prompt_source,
    mini_batches_are_equal,
    lengths_fit,
    micro_batches_hold_a_sample,
    record_or_replay,
)
