"""Every rule of stage ppo on the algorithm, its scores and its corrections, broken at least once."""

from __future__ import annotations

from megarl.config.rules import algorithm_rules, data_rules, rollout_rules, scoring_rules, training_rules
from tests.config.debug import ACTOR, EVALUATION, FUNCTIONS, GRPO, OWN_DEVICE, PTX, SPARE, Cases, without

REFERENCE = "groups.train.roles.reference"
IN_LOSS = ["algo.kl.in=loss", "algo.kl.estimator=k3"]
SAMPLES = "data.samples_per_prompt"
CORRECTION = "algo.correction"
REJECT = f"{CORRECTION}.reject"
NO_CRITIC = without("train", ["critic"])
NO_REFERENCE = without("train", ["reference"])
NO_REWARD = without("train", ["reward"])

ANCHORED = "algo.policy_loss=tests.own_functions:anchored"
"""A policy loss that reads the reference's log-probabilities and the critic's values."""

SHARED = ["actor.lora.rank=4", f"{REFERENCE}={{tp: 2, pp: 2}}", "critic={shares_base: true, lora: {rank: 2}}"]

ALGORITHMS: Cases = {
    algorithm_rules.advantages_have_their_critic: [
        (NO_CRITIC, "algo.advantage", "role critic"),
        ([*NO_CRITIC, "algo.advantage=vapo"], "role critic"),
        (["critic=null"], "advantage gae needs the section critic"),
        (["algo.advantage=grpo"], "groups.train.roles.critic", "has no critic"),
        (["algo.advantage=reinforce_pp"], "critic", "no effect with advantage reinforce_pp"),
        (["algo.advantage={name: a.b:c, level: token}", "critic=null"], "groups.train.roles.critic", "has no critic"),
        (["algo.advantage=a.b:c"], "critic", "no effect with advantage a.b:c"),
    ],
    algorithm_rules.values_have_a_critic: [
        ([*GRPO, ANCHORED], "algo.policy_loss.name", "reads values: needs a critic")
    ],
    algorithm_rules.groups_of_samples_are_compared: [
        ([*GRPO, f"{SAMPLES}=1"], "at least 2 with advantage grpo"),
        ([*GRPO, "algo.advantage=dr_grpo", f"{SAMPLES}=1"], "at least 2 with advantage dr_grpo"),
        ([*GRPO, "algo.advantage=rloo_std", f"{SAMPLES}=2"], "at least 3 with advantage rloo_std"),
    ],
    rollout_rules.kept_tokens_need_a_bound: [
        (["rollout.kept_max=64"], "has no effect where nothing is trained on ratios of a part of the tokens"),
        (["rollout={top_k: 50, kept_max: 40}"], "rollout.kept_max", "with rollout.top_k, which bounds the tokens"),
    ],
    rollout_rules.drafts_are_checked: [
        (["rollout={speculative: 4, min_p: 0.1}"], "rollout.speculative", "0 with rollout.min_p"),
        (["rollout={speculative: 4, min_new_tokens: 2}"], "rollout.speculative", "0 with rollout.min_new_tokens"),
    ],
    rollout_rules.draft_models_stay: [
        (
            ["rollout={draft_model: nowhere, speculative: 2}"],
            "rollout.draft_model",
            "a directory with a readable config.json",
        ),
        (["rollout.draft_model=nowhere"], "rollout.draft_model", "has no effect with rollout.speculative = 0"),
    ],
    rollout_rules.divergences_are_of_all_tokens: [
        ([*GRPO, "algo.kl={in: loss, estimator: full, coef: 0.1}", "rollout.top_p=0.9"], "1.0 with algo.kl.estimator"),
        ([*GRPO, "algo.kl={in: loss, estimator: full, coef: 0.1}", "rollout.min_p=0.1"], "0.0 with algo.kl.estimator"),
    ],
    rollout_rules.end_tokens_are_sampled: [
        (["rollout={min_new_tokens: 4, max_new_tokens: 4}"], "rollout.min_new_tokens", "0 with policy loss ppo"),
    ],
    algorithm_rules.references_follow_in_time: [(["algo.kl.reference_sync.every=3"], "below run.steps = 3")],
    algorithm_rules.responses_weigh_alike: [
        (["algo.policy_loss=gspo"], "algo.aggregation", "sequence_mean with policy loss gspo"),
        (["algo.policy_loss=gmpo", "algo.aggregation=token_sum"], "weigh them by their length"),
    ],
    algorithm_rules.ratios_have_room: [
        (["algo.policy_loss.delta=1.2"], "above 1 + clip_high = 1.2"),
        (["algo.policy_loss={clip_high: 0.5, ratio_clamp: [0, 1.4]}"], "algo.policy_loss.ratio_clamp", "[0.8, 1.5]"),
    ],
    training_rules.warm_ups_end: [(["critic.warmup_steps=3"], "below run.steps = 3")],
    algorithm_rules.penalty_has_a_reference: [
        (NO_REFERENCE, "algo.kl.coef", "needs the role reference"),
        ([*NO_REFERENCE, ANCHORED], "algo.policy_loss.name", "reads ref_logprobs: needs a reference"),
        (["algo.kl.coef=0"], "no effect otherwise"),
    ],
    algorithm_rules.teachers_stay: [],  # in a test of its own: it needs a checkpoint
    algorithm_rules.teachers_have_a_column: [(["reference.column=kind"], "has an effect with reference.teachers")],
    algorithm_rules.references_share_the_actors_ranks: [
        (["algo.kl.reference_sync.every=2"], f"{REFERENCE}.pp", "2 as of the actor with algo.kl.reference_sync"),
        ([*IN_LOSS, "algo.kl.estimator=full"], f"{REFERENCE}.pp", "with algo.kl.estimator = full"),
        (
            [*NO_REFERENCE, *SPARE, "algo.kl.reference_sync.every=2", "groups.spare.roles.reference={}"],
            "in the group of the actor",
        ),
    ],
    algorithm_rules.references_are_the_actor_without_adapters: [
        (["actor.lora.rank=4"], f"{REFERENCE}.pp", "2 as of the actor with actor.lora"),
        (
            ["actor.lora.rank=4", f"{REFERENCE}={{tp: 2, pp: 2}}", "algo.kl.reference_sync.every=2"],
            "algo.kl.reference_sync",
            "null with actor.lora",
        ),
    ],
    algorithm_rules.critics_share_frozen_weights: [
        (["critic.shares_base=true"], "critic.shares_base", "false without actor.lora and critic.lora"),
        (
            [*SHARED, "critic.path=x", "groups.train.roles.critic={tp: 2, pp: 2}"],
            "critic.shares_base",
            "false with critic.path",
        ),
        (
            [*SHARED, "groups.train.roles.critic={tp: 2, pp: 1}"],
            "groups.train.roles.critic.pp",
            "2 as of the actor with critic.shares_base",
        ),
    ],
    rollout_rules.separate_adapters_are_on_weights_as_they_are: [
        (
            [
                "actor.lora.rank=4",
                f"{REFERENCE}={{tp: 2, pp: 2}}",
                "resharding.adapters=separate",
                "rollout.quantization=fp8_per_channel",
            ],
            "rollout.quantization",
            "null with resharding.adapters = separate",
        ),
    ],
    algorithm_rules.bounds_are_in_order: [
        (
            [f"{REJECT}=[{{statistic: token_k1, upper: 2, lower: 3}}]"],
            f"{REJECT}.0.lower",
            f"below {REJECT}.0.upper = 2",
        ),
        (
            [f"{REJECT}=[{{statistic: token_k2, upper: 2, lower: 1}}]"],
            f"{REJECT}.0.lower",
            "token_k2 is never negative",
        ),
        ([f"{REJECT}=[{{statistic: token_k1, upper: 0.5}}]"], f"{REJECT}.0.upper", "the usual one is 1 / upper"),
    ],
    rollout_rules.updates_roll_over_engines: [
        (
            [*OWN_DEVICE, "rollout={max_staleness: 1, mode: inflight}", "rollout.rolling_update=true"],
            "no effect with one engine",
        ),
    ],
    rollout_rules.engines_that_need_devices_of_their_own: [
        (["rollout={max_staleness: 1, mode: bounded}"], "rollout.devices", "a group has 0 too"),
        ([*OWN_DEVICE, "rollout={max_staleness: 1, mode: inflight}", "rollout.devices=2-4"], "a group has 2, 3 too"),
        (["evaluation=x", "rollout.max_replacements=1"], "0 where a group has devices of the engines"),
        (["rollout.inference_parts=2"], "1 where a group has devices of the engines"),
    ],
    rollout_rules.evaluations_in_the_background: [
        ([EVALUATION, "rollout.max_staleness=1", "evaluation.blocking=false"], "true where a group has devices"),
    ],
    rollout_rules.parts_have_samples: [
        ([*OWN_DEVICE, "rollout.inference_parts=17"], "at most 16, the samples of a step"),
        (
            [*OWN_DEVICE, "reward.functions=[{name: 'own:ranks', per: group}]", "rollout.inference_parts=2"],
            "1 where a function scores all responses to a prompt",
        ),
    ],
    rollout_rules.syncs_meet: [
        (["rollout.sync_every=2", "checkpoint.every=3"], "a multiple of rollout.sync_every = 2"),
        (["rollout.sync_every=2", EVALUATION, "evaluation.every=1"], "have older weights otherwise"),
    ],
    training_rules.kept_checkpoints_are_made: [
        (["checkpoint={every: 4, keep_every: 6}"], "checkpoint.keep_every", "a multiple of checkpoint.every = 4"),
        (["checkpoint={every: null, keep_every: 6}"], "checkpoint.keep_every", "checkpoint.every = null"),
    ],
    training_rules.best_checkpoints_are_evaluated: [
        (["checkpoint.best.metric=eval/score"], "checkpoint.best", "a metric of evaluation, which is missing"),
        (
            [EVALUATION, "evaluation.every=2", "checkpoint={every: null, best: {metric: eval/length}}"],
            "checkpoint.best",
            "checkpoint.every = null must be a multiple of evaluation.every = 2",
        ),
    ],
    data_rules.curricula_read_scores: [
        (
            ["data.curriculum={name: pools, hard_share: 0.4, easy_share: 0.7}"],
            "data.curriculum.easy_share",
            "hard_share + easy_share must be",
        ),
        (["data.curriculum=thompson", "reward.dense=scores"], "data.curriculum", "reads the scores of responses"),
        (["data.curriculum=thompson", "run.steps=1"], "data.curriculum", "step 2 is the first to read scores"),
    ],
    scoring_rules.scores_have_a_source: [
        (NO_REWARD, "reward", "reward.functions a function"),
        ([*NO_REWARD, "environment.name=tools"], "reward", "other than tools and user_turns"),
        (["reward={weight: 0.0, functions: [{name: length, weight: 0}]}"], "nothing could be learned"),
    ],
    scoring_rules.processes_have_functions: [
        (["reward.processes=2"], "no effect without functions"),
        (["reward.time_limit=2"], "no effect without functions"),
    ],
    scoring_rules.calls_end_in_time: [
        ([FUNCTIONS, "cluster.time_limits.scoring=60"], "reward.time_limit", "at most 54, nine tenths of")
    ],
    scoring_rules.unfinished_responses_are_compared: [
        ([*GRPO, "algo.advantage=gdpo"], "algo.scores.missing_end", "the score of each source as it is"),
        ([*GRPO, "algo.advantage=masked_rloo", "algo.scores.missing_end=null"], "compares the responses that ended"),
        ([*GRPO, "algo.advantage=masked_rloo"], "algo.scores.missing_end", "compares the responses that ended"),
    ],
    scoring_rules.scores_end_at_tokens: [
        (["rollout.max_new_tokens=x", "algo.scores.truncate_at.token=96"], "below 96"),
    ],
    scoring_rules.evaluations_report_something: [
        ([*NO_REWARD, FUNCTIONS, EVALUATION, "evaluation.functions=[]"], "something to measure")
    ],
    scoring_rules.functions_have_their_calls: [
        (["evaluation.functions=[{name: a}, {name: b, weight: 2}]"], "evaluation.functions.1.weight", "each function"),
        (["reward.functions=[{name: regex, per: batch}]"], "reward.functions.0.per", "with a built-in function"),
        (
            ["reward.functions=[{name: judge, concurrency: 4}, {name: regex, concurrency: 4}]"],
            "reward.functions.1.concurrency",
            "no effect with a built-in function",
        ),
        (["reward.functions=[{name: 'a:b', per: group, cache: true}]"], "reward.functions.0.cache", "per: group"),
        (["reward.functions=[{name: 'a:b', adapter: trl, per: response}]"], "reward.functions.0.per", "batch or group"),
        (
            ["evaluation.functions=[{name: 'a:b', adapter: verl, per: group}]"],
            "evaluation.functions.0.per",
            "response or batch",
        ),
    ],
    scoring_rules.evaluations_have_samples: [
        ([EVALUATION, "evaluation.pass_at=[2]"], "at most evaluation.samples_per_prompt = 1"),
    ],
    training_rules.profiles_have_an_effect: [
        (["profile.steps=[2, 4]"], "none above 3"),
        (["profile.ranks=[4]"], "none above 3"),
        (["profile.engines=[1]"], "none above 0"),
        (["profile={ranks: [], engines: []}"], "profile.ranks", "a rank or an engine must be profiled"),
        (["rollout={tp: 2, devices: 0-1}", "profile.ranks=[]"], "a rank or an engine must be profiled"),
        (["rollout={tp: 2, devices: 0-1}", "profile.engines=[0]"], "processes that are not profiled"),
    ],
    training_rules.health_checks_have_metrics: [
        (["health.stop=[sft/grad_norm]"], "a metric of stage ppo"),
        (["health.stop=[skipped, objective/kl, sft/grad_norm]"], "a metric of stage ppo"),
    ],
    data_rules.micro_batches_hold_a_sample: [
        ([PTX, "ptx.max_tokens=129"], f"{ACTOR}.tokens_per_micro_batch", "at least ptx.max_tokens = 129")
    ],
    training_rules.rates_fall: [
        (["actor.optimizer.schedule=linear", "actor.optimizer.final_lr=1e-4"], "below lr = 0.0001, from which a linear")
    ],
}
