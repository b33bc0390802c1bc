"""The oracle's settings of every recipe: taken from its source, not read from its file.

Learning rates and sizes are those of the runs; see ``recipes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tests.e2e.recipes import Case
from tests.oracle import advantages, aggregation, comparisons, corrections, kl, normalisation, policy, scores, selection
from tests.oracle import values as critic
from tests.oracle.adam import AdamSettings
from tests.oracle.models import Sample
from tests.oracle.ppo import Settings


def adam(**fields: Any) -> AdamSettings:
    """Adam with the learning rate of the runs."""
    return AdamSettings(lr=2e-3, **fields)


USUAL = adam(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad=1.0)
TORCH = adam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip_grad=1.0)
DECAYING = adam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, clip_grad=1.0)
HEAVY = adam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, clip_grad=1.0)
TENSORFLOW = adam(
    betas=(0.9, 0.999),
    eps=1e-5,
    clip_grad=None,
    tensorflow=True,
    schedule=lambda update: 1 - update // 4 / 2,  # four optimizer steps of the first step, then four of the second
)
COLOSSAL = adam(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, clip_grad=0.1)
GAE = partial(advantages.gae, gamma=1.0, lam=0.95)
CLIPPED = partial(policy.ppo, clip=0.2)
NEAR = partial(critic.mse, clip=0.2, scale=0.5)
GRPO = partial(comparisons.grpo, eps=1e-6, ddof=1)
CLIPPED_RATIO = partial(policy.ppo, clip=0.2, clip_high=0.28)
OF_GRPO = Settings(
    actor=USUAL,
    kl_coef=0.04,
    kl_estimate=kl.k3,
    kl_in_loss=True,
    compare=GRPO,
    policy=CLIPPED,
    aggregate=aggregation.sequence_mean,
)
WITHIN_5 = partial(scores.clipped, low=-5.0, high=5.0)
WITHIN_10 = partial(scores.clipped, low=-10.0, high=10.0)


def best_fifth(samples: Sequence[Sample]) -> list[Sample]:
    """The best fifth of all samples."""
    return selection.best_of_all(samples, 0.2)


def best_finished(samples: Sequence[Sample]) -> list[Sample]:
    """The best finished response to each prompt."""
    return selection.best_of_each([sample if sample.finished else replace(sample, score=None) for sample in samples])


IN_MATRIX = frozenset(
    (
        *("lm_human_preferences", "openrlhf_reinforce_pp_baseline"),
        *("deepspeed_chat", "trl_ppo", "verl_ppo", "reinforce_pp", "rloo", "trl_grpo", "dr_grpo"),
        *("gspo", "cispo", "sapo", "gmpo", "opo", "areal", "colossalchat", "dapo", "vapo", "nemo_aligner_reinforce"),
    )
)
"""Recipes that differ from the others in formulas alone: `make matrix` has their short runs, and
tests/megatron/test_oracle.py one iteration of each in every `make test`."""

CASES: dict[str, Case] = {
    "lm_human_preferences": Case(
        critic="new",
        reference=True,
        prompts=12,
        samples=1,
        epochs=4,
        mini_batches=1,
        truncation=(13, 4),
        changes={
            "algo": {"scores": {"truncate_at": {"token": 13, "after": 4}}, "kl": {"horizon": 24}},
            "actor": {"optimizer": {"schedule": "anneal"}},
            "critic": {"optimizer": {"schedule": "anneal"}},
        },
        settings=Settings(
            actor=TENSORFLOW,
            critic=TENSORFLOW,
            temperature=0.7,
            shapes=[partial(scores.replaced, score_of_unfinished=-1.0)],
            kl_coef=0.15,
            kl_target=6.0,
            kl_horizon=24,
            whiten_rewards=True,
            estimate=GAE,
            normalise=normalisation.whiten,
            policy=CLIPPED,
            value=NEAR,
        ),
    ),
    "instructgpt_ppo": Case(
        critic="loaded",
        reference=True,
        mixes=True,
        average=True,
        prompts=12,
        samples=1,
        settings=Settings(
            actor=USUAL,
            critic=USUAL,
            kl_coef=0.02,
            estimate=GAE,
            normalise=normalisation.whiten,
            policy=CLIPPED,
            value=NEAR,
            mixing="add",
            mixing_coef=27.8,
            average_decay=0.992,
        ),
    ),
    "deepspeed_chat": Case(
        critic="loaded",
        reference=True,
        mixes=True,
        average=True,
        prompts=12,
        samples=1,
        settings=Settings(
            actor=USUAL,
            critic=USUAL,
            shapes=[WITHIN_5],
            kl_coef=0.1,
            estimate=GAE,
            policy=CLIPPED,
            value=NEAR,
            mixing="deepspeed",
            mixing_coef=27.8,
            average_decay=0.992,
        ),
    ),
    "colossalchat": Case(
        critic="loaded",
        reference=True,
        prompts=12,
        samples=1,
        settings=Settings(
            actor=COLOSSAL,
            critic=COLOSSAL,
            temperature=0.7,
            shapes=[WITHIN_5],
            every_token_scored=True,
            kl_coef=0.1,
            estimate=GAE,
            policy=partial(policy.ppo, clip=0.2, ratio_clamp=(0.0, 10.0)),
            value=NEAR,
            aggregate=aggregation.sequence_mean,
        ),
    ),
    "trl_ppo": Case(
        critic="loaded",
        reference=True,
        prompts=12,
        samples=1,
        epochs=4,
        mini_batches=1,
        settings=Settings(
            actor=TORCH,
            critic=TORCH,
            temperature=0.7,
            kl_coef=0.05,
            estimate=GAE,
            normalise=partial(normalisation.whiten, ddof=1),
            policy=CLIPPED,
            value=partial(critic.mse, clip=0.2, scale=0.05),
        ),
    ),
    "verl_ppo": Case(
        critic="new",
        prompts=12,
        samples=1,
        settings=Settings(
            actor=DECAYING,
            critic=DECAYING,
            estimate=partial(advantages.gae, gamma=1.0, lam=1.0),
            normalise=partial(normalisation.whiten, ddof=1),
            policy=partial(policy.ppo, clip=0.2, dual_clip=3.0),
            value=partial(critic.mse, clip=0.5, scale=0.5),
        ),
    ),
    "vapo": Case(
        critic="new",
        critic_first=1,
        changes={"critic": {"warmup_steps": 1}},
        settings=Settings(
            actor=USUAL,
            critic=USUAL,
            estimate=partial(advantages.vapo, gamma=1.0, lam_value=1.0, length_alpha=0.05),
            normalise=normalisation.whiten,
            policy=CLIPPED_RATIO,
            value=partial(critic.mse, clip=None, scale=0.5),
        ),
    ),
    "openrlhf_reinforce_pp_baseline": Case(
        reference=True,
        divisor=2,
        keeps=selection.between,
        prompts=8,
        samples=2,
        mini_batches=1,
        settings=Settings(
            actor=USUAL,
            shapes=[WITHIN_10],
            kl_coef=1e-5,
            kl_estimate=kl.k2,
            kl_in_loss=True,
            compare=comparisons.dr_grpo,
            normalise=partial(normalisation.whiten, form="var_clamp"),
            weigh=[partial(corrections.token_mask, lower=0.5, upper=5.0)],
            policy=CLIPPED,
        ),
    ),
    "reinforce_pp": Case(
        reference=True,
        prompts=12,
        samples=1,
        settings=Settings(
            actor=USUAL,
            shapes=[WITHIN_10],
            kl_coef=1e-4,
            estimate=partial(advantages.reward_to_go, gamma=1.0),
            normalise=partial(normalisation.whiten, form="var_clamp"),
            policy=CLIPPED,
        ),
    ),
    "rloo": Case(
        reference=True,
        settings=Settings(actor=USUAL, shapes=[WITHIN_10], kl_coef=0.01, compare=comparisons.rloo, policy=CLIPPED),
    ),
    "opd": Case(
        reference=True,
        teacher=True,
        mini_batches=1,
        settings=Settings(
            actor=USUAL, kl_coef=1.0, compare=comparisons.none, cumulative=False, policy=policy.reinforce
        ),
    ),
    "opd_full": Case(
        reference=True,
        teacher=True,
        mini_batches=1,
        changes={
            "cluster": {"devices_per_node": 3},
            "groups": {"train": {"devices": "0,2", "roles": {"actor": {"tp": 2}, "reference": {"tp": 2}}}},
        },
        settings=Settings(
            actor=TORCH,
            temperature=0.9,
            kl_coef=1.0,
            kl_in_loss=True,
            kl_of_distributions=kl.jensen_shannon,
            compare=comparisons.none,
            policy=policy.reinforce,
        ),
    ),
    "grpo": Case(reference=True, mini_batches=1, settings=OF_GRPO),
    "grpo_lora": Case(reference=True, mini_batches=1, settings=OF_GRPO, adapters=True),
    "trl_grpo": Case(
        mini_batches=1,
        settings=Settings(
            actor=TORCH,
            compare=partial(comparisons.grpo, eps=1e-4, ddof=1),
            weigh=[partial(corrections.sequence_mask, upper=3.0)],
            policy=CLIPPED,
        ),
    ),
    "dr_grpo": Case(
        mini_batches=1,
        settings=Settings(
            actor=USUAL,
            compare=comparisons.dr_grpo,
            policy=CLIPPED,
            aggregate=partial(aggregation.sequence_sum_norm, tokens=3000),
        ),
    ),
    "dapo": Case(
        divisor=2,
        samples=2,  # their scores are often equal
        keeps=selection.deviating,
        changes={
            "reward": {
                "functions": [
                    {"name": "tests.e2e.rules:remainder", "args": {"divisor": 2}},
                    {"name": "soft_overlong", "args": {"max_tokens": 12, "buffer_tokens": 3}},
                ]
            }
        },
        settings=Settings(
            actor=HEAVY,
            shapes=[partial(scores.overlong, most=12, buffer=3)],
            compare=GRPO,
            policy=CLIPPED_RATIO,
        ),
    ),
    "gspo": Case(
        settings=Settings(
            actor=HEAVY,
            compare=GRPO,
            policy=partial(policy.gspo, clip=3e-4, clip_high=4e-4),
            aggregate=aggregation.sequence_mean,
        ),
    ),
    "cispo": Case(
        divisor=2,
        keeps=selection.deviating,
        prompts=8,
        samples=2,
        settings=Settings(
            actor=adam(betas=(0.9, 0.95), eps=1e-15, clip_grad=1.0),
            compare=GRPO,
            policy=partial(policy.cispo, clip_high=4.0, upper_only=True),
        ),
    ),
    "sapo": Case(
        settings=Settings(
            actor=HEAVY,
            compare=GRPO,
            policy=partial(policy.sapo, tau_pos=1.0, tau_neg=1.05),
            aggregate=aggregation.sequence_mean,
        ),
    ),
    "gmpo": Case(
        settings=Settings(
            actor=USUAL, compare=GRPO, policy=partial(policy.gmpo, clip=0.4), aggregate=aggregation.sequence_mean
        ),
    ),
    "remax": Case(
        reference=True,
        greedy=True,
        settings=Settings(
            actor=DECAYING,
            kl_coef=1e-3,
            compare=comparisons.remax,
            policy=partial(policy.ppo, clip=0.2, dual_clip=3.0),
        ),
    ),
    "opo": Case(
        mini_batches=1,
        settings=Settings(actor=DECAYING, compare=comparisons.opo, policy=policy.reinforce),
    ),
    "one_step_off": Case(
        changes={
            "reward": {
                "functions": [
                    {"name": "tests.e2e.rules:remainder", "args": {"divisor": 7}},
                    {"name": "soft_overlong", "args": {"max_tokens": 12, "buffer_tokens": 3}},
                ]
            }
        },
        settings=Settings(
            actor=HEAVY,
            shapes=[partial(scores.overlong, most=12, buffer=3)],
            compare=GRPO,
            bypass=True,
            policy=partial(policy.ppo, clip=0.2, clip_high=0.28, dual_clip=10.0),
        ),
    ),
    "areal": Case(
        settings=Settings(
            actor=DECAYING,
            compare=partial(comparisons.grpo, eps=1e-5, ddof=1),
            normalise=partial(normalisation.levels, mean="batch", std="batch", unbiased=True, eps=1e-5),
            weigh=[partial(corrections.token_mask, upper=5.0)],
            policy=partial(policy.ppo, clip=0.4),
        ),
    ),
    "nemo_aligner_reinforce": Case(
        reference=True,
        settings=Settings(
            actor=adam(betas=(0.9, 0.98), weight_decay=0.1, clip_grad=1.0),
            mask_unfinished=True,
            kl_coef=0.01,
            kl_estimate=kl.absolute,
            cumulative=False,
            compare=comparisons.masked_rloo,
            policy=policy.reinforce,
        ),
    ),
    "raft": Case(select=best_fifth, prompts=16, samples=1, mini_batches=1, settings=Settings(actor=TORCH)),
}
RUNS: dict[str, Case] = {
    **CASES,
    "raft_local": Case(
        recipe="raft",
        select=best_finished,
        prompts=6,
        epochs=2,
        changes={
            "algo": {"select": {"by": "local", "discard_unfinished": True}},
            "actor": {"optimizer": {"schedule": "linear"}},
        },
        settings=Settings(actor=replace(TORCH, schedule=lambda update: 1 - update / 8)),  # over the whole run
    ),
}
"""The recipes, and one with other options, which `make matrix` runs; tests/loop/test_scoring.py has the selections."""
