"""The rules of the other stages that ppo does not have, and some on sections that only they have."""

from __future__ import annotations

from typing import Any

from megarl.config.rules import (
    algorithm_rules,
    data_rules,
    placement_rules,
    rollout_rules,
    scoring_rules,
    training_rules,
)
from megarl.stages.dpo import config as dpo_config
from megarl.stages.reward_model import config as reward_model_config
from tests.config.debug import ACTOR, Cases

SFT: Cases = {
    placement_rules.roles_belong_to_the_stage: [
        (["groups.train.roles.critic={}"], "the role must be one of those of stage sft: actor")
    ],
    placement_rules.offloading_frees_devices: [([f"{ACTOR}.offload=true"], "another role")],
    data_rules.sources_exist: [
        (["data.evaluation=/nowhere.parquet"], "a file that exists"),
        (["data.train={path: x.jsonl, subset: main}"], "data.train.subset", "this is a file"),
    ],
    data_rules.micro_batches_hold_a_sample: [
        (["data.max_tokens=129"], f"{ACTOR}.tokens_per_micro_batch", "data.max_tokens = 129")
    ],
    training_rules.best_checkpoints_are_evaluated: [
        (
            ["checkpoint.best.metric=eval/loss", "data.evaluation=null"],
            "checkpoint.best",
            "data.evaluation, which is missing",
        ),
        (
            ["checkpoint={every: 4, best: {metric: eval/loss}}", "data.evaluate_every=3"],
            "checkpoint.best",
            "checkpoint.every = 4 must be a multiple of data.evaluate_every = 3",
        ),
    ],
    training_rules.rates_fall: [(["actor.optimizer.final_lr=1e-3"], "a linear schedule comes down")],
    training_rules.health_checks_have_metrics: [(["health.limits={truncated_fraction: 0.1}"], "a metric of stage sft")],
}

REWARD = "groups.train.roles.reward"

REWARD_MODEL: Cases = {
    placement_rules.roles_belong_to_the_stage: [
        (["groups.train.roles.actor={}"], "the role must be one of those of stage reward_model: reward"),
        (["groups.train.roles={reward: null, actor: {}}"], "groups", "role reward"),
    ],
    placement_rules.engine_devices_exist: [(["rollout.devices=7"], "= 4")],
    data_rules.lengths_fit: [(["rollout.max_model_len=32"], "must cover the longest prompt and")],
    data_rules.micro_batches_hold_a_sample: [
        (["data.max_tokens=65"], f"{REWARD}.tokens_per_micro_batch", "twice data.max_tokens, for a pair, = 130")
    ],
    reward_model_config.reward_models_are_exported: [
        (["reward.lora={rank: 4, merge: false}"], "reward.lora.merge", "belongs to a whole model"),
    ],
    reward_model_config.reference_samples_have_engines: [
        (["rollout=null"], "normalisation", "needs the section rollout"),
        (["normalisation=null"], "rollout", "normalisation alone"),
    ],
}


def of_pairs_and_responses(chosen: Any, ref_logprobs: Any) -> Any:
    """A loss of the user's own that reads what no step has."""


DPO: Cases = {
    dpo_config.losses_have_their_reference: [
        (["groups.train.roles.reference=null"], "preference.loss.name", "under the role reference, which no group has"),
        (["preference.loss=simpo"], "preference.loss.name", "reads no reference"),
        (["reference.precompute=true"], "reference.precompute", "with the role reference in a group"),
        (
            ["reference.precompute=true", "groups.train.roles.reference=null", "preference.loss=kto"],
            "reference.precompute",
            "the divergence of each step",
        ),
        (
            ["reference.precompute=true", "groups.train.roles.reference=null", "preference.loss=orpo"],
            "reference.precompute",
            "no effect with orpo",
        ),
    ],
    dpo_config.losses_read_one_kind_of_rows: [
        (["preference.loss=kto", "data.pairs_per_step=1"], "at least 2 with kto"),
        (
            ["preference.loss=tests.config.broken_stages:of_pairs_and_responses"],
            "preference.loss.name",
            "inputs of pairs and of single responses",
        ),
    ],
}

RAFT: Cases = {
    algorithm_rules.penalties_act: [(["algo.kl.in=loss"], "no effect with algo.kl.coef = 0")],
    training_rules.samples_fill_mini_batches: [
        (["algo.mini_batches=7"], "at most 6, the samples that are selected"),
        (
            ["algo={select: {by: top}, mini_batches: 5}"],
            "algo.mini_batches",
            "at most 4, the samples that are selected",
        ),
        (["algo.scores.missing_end=replace"], "no effect with algo.select.discard"),
    ],
    training_rules.losses_have_their_advantages: [
        (["algo.advantage=grpo"], "none with policy loss sft"),
        (["algo.policy_loss=ppo"], "algo.advantage", "an advantage, which policy loss ppo reads"),
    ],
}

EVAL: Cases = {
    rollout_rules.sleeping_frees_devices: [(["rollout.sleep=true"], "has devices of the engines")],
    placement_rules.roles_belong_to_the_stage: [
        (
            ["groups.train={devices: 0, roles: {actor: {}}}"],
            "groups.train.roles.actor",
            "the role must be one of those of stage eval: reward",
        )
    ],
    placement_rules.recomputation_is_for_a_backward_pass: [
        (
            ["groups.train={devices: 0, roles: {reward: {recompute: full}}}"],
            "groups.train.roles.reward.recompute",
            "roles in training alone (none)",
        )
    ],
    scoring_rules.evaluations_report_something: [
        (["evaluation.functions=[]"], "something to measure"),
        (["environment.name=tools", "evaluation.functions=[]"], "something to measure"),
    ],
}
