"""Every rule of stage ppo on the algorithm, its scores and its corrections, broken at least once."""

from __future__ import annotations

from megarl.config.rules import algorithm_rules, data_rules, rollout_rules, scoring_rules, training_rules
from tests.config.debug import ACTOR, EVALUATION, FUNCTIONS, GRPO, OWN_DEVICE, PTX, Cases, without

REFERENCE = "groups.train.roles.reference"
IN_LOSS = ["algo.kl.in=loss", "algo.kl.estimator=k3"]
SAMPLES = "data.samples_per_prompt"

# rule -> (overrides of the debug run, the field that is named, a part of the rule's text)
ANCHORED = "algo.policy_loss=tests.own_functions:anchored"
"""A policy loss that reads the reference's log-probabilities and the critic's values."""

ALGORITHMS: Cases = {
    algorithm_rules.advantages_have_their_critic: [
        (without("train", ["critic"]), "algo.advantage", "role critic"),
        ([*without("train", ["critic"]), "algo.advantage=vapo"], "algo.advantage", "role critic"),
        (["critic=null"], "critic", "advantage gae needs the section critic"),
        (["algo.advantage=grpo"], "groups.train.roles.critic", "has no critic"),
        (["algo.advantage=reinforce_pp"], "critic", "no effect with advantage reinforce_pp"),
        (["algo.advantage={name: a.b:c, level: token}", "critic=null"], "groups.train.roles.critic", "has no critic"),
        (["algo.advantage=a.b:c"], "critic", "no effect with advantage a.b:c"),
    ],
    algorithm_rules.values_have_a_critic: [
        ([*GRPO, ANCHORED], "algo.policy_loss.name", "reads values: needs a critic"),
    ],
    algorithm_rules.groups_of_samples_are_compared: [
        ([*GRPO, f"{SAMPLES}=1"], SAMPLES, "at least 2 with advantage grpo"),
        ([*GRPO, f"{SAMPLES}=1", "algo.advantage=dr_grpo"], SAMPLES, "at least 2 with advantage dr_grpo"),
        ([*GRPO, f"{SAMPLES}=2", "algo.advantage=rloo_std"], SAMPLES, "at least 3 with advantage rloo_std"),
    ],
    rollout_rules.all_tokens_are_sampled: [
        (["rollout.top_p=0.8"], "rollout.top_p", "1.0 with policy loss ppo"),
        ([*GRPO, "rollout.top_k=50"], "rollout.top_k", "null with policy loss ppo"),
        (["rollout={min_new_tokens: 4, max_new_tokens: 4}"], "rollout.min_new_tokens", "0 with policy loss ppo"),
    ],
    rollout_rules.samples_differ: [
        (["rollout.top_k=1"], SAMPLES, "would all be the same"),
        (
            ["rollout.top_k=1", EVALUATION, "evaluation.samples_per_prompt=2"],
            "evaluation.samples_per_prompt",
            "would all be the same",
        ),
    ],
    algorithm_rules.references_follow_in_time: [
        (["algo.kl.reference_sync.every=3"], "algo.kl.reference_sync.every", "below run.steps = 3")
    ],
    algorithm_rules.normalisers_are_whole: [
        (["algo.normalise.advantages={name: levels, mean: null, std: null}"], "algo.normalise.advantages", "shifts or"),
        (["algo.normalise.advantages=grouped_tokens", f"{SAMPLES}=1"], SAMPLES, "over the samples of a prompt"),
        (["algo.normalise.advantages={name: levels, std: group}", f"{SAMPLES}=1"], SAMPLES, "at least 2"),
    ],
    algorithm_rules.token_rewards_are_read: [
        ([*GRPO, "algo.normalise.rewards=true"], "algo.normalise.rewards", "which compares scores"),
        ([*GRPO, "algo.scores.placement=every_valid"], "algo.scores.placement", "which compares scores"),
    ],
    algorithm_rules.responses_weigh_alike: [
        (["algo.policy_loss=gspo"], "algo.aggregation", "sequence_mean with policy loss gspo"),
        (["algo.policy_loss=gmpo", "algo.aggregation=token_sum"], "algo.aggregation", "weigh them by their length"),
    ],
    algorithm_rules.ratios_have_room: [
        (["algo.policy_loss.delta=1.2"], "algo.policy_loss.delta", "above 1 + clip_high = 1.2"),
        (["algo.policy_loss={clip_high: 0.5, ratio_clamp: [0, 1.4]}"], "algo.policy_loss.ratio_clamp", "[0.8, 1.5]"),
    ],
    algorithm_rules.filters_compare: [
        (["algo.filter=nonzero_std", f"{SAMPLES}=1"], SAMPLES, "a sample alone has no deviation"),
        (["algo.filter={name: open_range, low: 1.0}"], "algo.filter.low", "below algo.filter.high = 1"),
    ],
    training_rules.runs_have_a_length: [(["run.steps=null"], "run.steps", "run.steps or run.epochs is given")],
    training_rules.warm_ups_end: [(["critic.warmup_steps=3"], "critic.warmup_steps", "below run.steps = 3")],
    training_rules.value_heads_have_a_source: [
        (["critic.head=loaded"], "critic.head", "needs critic.path"),
    ],
    algorithm_rules.penalty_has_a_reference: [
        (without("train", ["reference"]), "algo.kl.coef", "needs the role reference"),
        (
            [*without("train", ["reference"]), ANCHORED],
            "algo.policy_loss.name",
            "reads ref_logprobs: needs a reference",
        ),
        (["algo.kl.coef=0"], "algo.kl.coef", "no effect otherwise"),
    ],
    algorithm_rules.penalties_act: [
        (["algo.kl.cumulative=false"], "algo.kl.cumulative", "which adds up rewards by itself"),
    ],
    algorithm_rules.estimators_fit_their_place: [
        (["algo.kl.in=loss"], "algo.kl.estimator", "where the gradient of k1 is 0 on average"),
        (["algo.kl.estimator=full"], "algo.kl.estimator", "full needs the whole distribution"),
        (["algo.kl.estimator=k3+"], "algo.kl.estimator", "differs from k3 in its gradient alone"),
    ],
    algorithm_rules.references_share_the_actors_ranks: [
        (
            ["algo.kl.reference_sync.every=2"],
            REFERENCE,
            "the actor's layout (tp 2, pp 2, vpp 1, ep 1, sequence_parallel False) with algo.kl.reference_sync",
        ),
        ([*IN_LOSS, "algo.kl.estimator=full"], REFERENCE, "with algo.kl.estimator = full"),
        (
            [
                "algo.kl.reference_sync.every=2",
                *without("train", ["reference"]),
                "groups.other={devices: 4-7, roles: {reference: {tp: 2, pp: 2, tokens_per_micro_batch: 128}}}",
                "cluster.devices_per_node=8",
            ],
            "groups.other.roles.reference",
            "in the group of the actor",
        ),
    ],
    algorithm_rules.bounds_are_in_order: [
        (
            ["algo.correction.weights={name: token_mask, lower: 2.0}"],
            "algo.correction.weights.lower",
            "below algo.correction.weights.upper",
        ),
        (
            ["algo.correction.reject=[{statistic: token_k1, upper: 2, lower: 3}]"],
            "algo.correction.reject.0.lower",
            "below algo.correction.reject.0.upper = 2",
        ),
        (
            ["algo.correction.reject=[{statistic: token_k2, upper: 2, lower: 1}]"],
            "algo.correction.reject.0.lower",
            "token_k2 is never negative",
        ),
        (
            ["algo.correction.reject=[{statistic: token_k1, upper: 0.5}]"],
            "algo.correction.reject.0.upper",
            "the usual one is 1 / upper",
        ),
    ],
    algorithm_rules.interpolation_has_an_age: [
        (["algo.correction.old_logprobs=linear"], "algo.correction.old_logprobs", "no rollout is older than the actor")
    ],
    algorithm_rules.normalised_weights_are_known: [
        (
            [
                "algo.correction={old_logprobs: loglinear, weights: {name: token_mask, batch_normalise: true}}",
                "rollout.sync_every=2",
            ],
            "algo.correction.weights.batch_normalise",
            "changes in each micro-batch",
        )
    ],
    rollout_rules.old_weights_are_kept: [
        (["rollout={sleep: true, sync_every: 2}"], "rollout.sync_every", "1 with rollout.sleep")
    ],
    rollout_rules.weights_stay_young: [
        (["rollout={max_staleness: 2, sync_every: 2}"], "rollout.sync_every", "1 with rollout.max_staleness = 2"),
        (
            [*OWN_DEVICE, "rollout={max_staleness: 1, mode: inflight, rolling_update: true}"],
            "rollout.rolling_update",
            "no effect with one engine",
        ),
    ],
    rollout_rules.engines_that_need_devices_of_their_own: [
        (["rollout={max_staleness: 1, mode: bounded}"], "rollout.devices", "a group has 0 too"),
        (
            [*OWN_DEVICE, "rollout={max_staleness: 1, mode: inflight, devices: 2-4}"],
            "rollout.devices",
            "a group has 2, 3 too",
        ),
        (["rollout.max_replacements=1"], "rollout.max_replacements", "0 where a group has devices of the engines"),
        (["rollout.inference_parts=2"], "rollout.inference_parts", "1 where a group has devices of the engines"),
    ],
    rollout_rules.parts_have_samples: [
        ([*OWN_DEVICE, "rollout.inference_parts=17"], "rollout.inference_parts", "at most 16, the samples of a step"),
        (
            [*OWN_DEVICE, "rollout.inference_parts=2", "reward.functions=[{name: 'own:ranks', per: group}]"],
            "rollout.inference_parts",
            "1 where a function scores all responses to a prompt together",
        ),
    ],
    rollout_rules.evaluations_in_the_background: [
        ([EVALUATION, "evaluation.blocking=false"], "evaluation.blocking", "true with rollout.max_staleness = 0"),
        (
            [EVALUATION, "evaluation.blocking=false", "rollout.max_staleness=1"],
            "evaluation.blocking",
            "true where a group has devices of the engines",
        ),
    ],
    algorithm_rules.stale_samples_are_clipped: [
        (["rollout.max_staleness=1", "algo.policy_loss=reinforce"], "algo.policy_loss", "a loss with a clip"),
    ],
    rollout_rules.syncs_meet: [
        (["rollout.sync_every=2", "checkpoint.every=3"], "checkpoint.every", "a multiple of rollout.sync_every = 2"),
        (
            ["rollout.sync_every=2", EVALUATION, "evaluation.every=1"],
            "evaluation.every",
            "have older weights otherwise",
        ),
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
            "checkpoint.every = null is a multiple of evaluation.every = 2",
        ),
    ],
    scoring_rules.scores_have_a_source: [
        (without("train", ["reward"]), "reward", "reward.functions has a function"),
        ([*without("train", ["reward"]), "environment.name=tools"], "reward", "other than tools and user_turns"),
        (["reward={weight: 0.0, functions: [{name: length, weight: 0}]}"], "reward", "nothing could be learned"),
    ],
    scoring_rules.reward_settings_have_their_model: [
        ([*without("train", ["reward"]), FUNCTIONS, "reward.path=x"], "reward.path", "no effect without the role"),
        ([*without("train", ["reward"]), FUNCTIONS, "reward.weight=2.0"], "reward.weight", "no effect without"),
        ([*without("train", ["reward"]), FUNCTIONS, "reward.dense=scores"], "reward.dense", "no effect without"),
    ],
    scoring_rules.processes_have_functions: [
        (["reward.processes=2"], "reward.processes", "no effect without functions"),
        (["reward.time_limit=2"], "reward.time_limit", "no effect without functions"),
    ],
    scoring_rules.calls_end_in_time: [
        ([FUNCTIONS, "cluster.time_limits.scoring=60"], "reward.time_limit", "at most 54, nine tenths of"),
    ],
    scoring_rules.unfinished_responses_are_compared: [
        ([*GRPO, "algo.advantage=gdpo"], "algo.scores.missing_end", "the score of each source as it is"),
        (
            [*GRPO, "algo={advantage: masked_rloo, scores: {missing_end: null}}"],
            "algo.scores.missing_end",
            "compares the responses that ended",
        ),
        ([*GRPO, "algo.advantage=masked_rloo"], "algo.scores.missing_end", "compares the responses that ended"),
    ],
    scoring_rules.dense_scores_are_read: [
        (
            [*without("train", ["critic"]), "critic=null", "algo.advantage=rloo", "reward.dense=scores"],
            "reward.dense",
            "which compares scores",
        ),
        (["reward.dense=scores", "algo.scores.truncate_at.token=1"], "algo.scores.truncate_at", "scores every token"),
        (["reward.dense=differences", "reward.shuffle=true"], "reward.shuffle", "fit no other response"),
    ],
    scoring_rules.rewards_of_turns_stay: [
        (["environment.name=a.b:C", "reward.shuffle=true"], "reward.shuffle", "places the rewards of turns"),
    ],
    scoring_rules.environments_end_in_time: [
        (["environment.name=tools"], "environment", "needs a tokenizer"),
        (["environment={name: tools, time_limit: 4000}"], "environment.time_limit", "cluster.time_limits.rollout = "),
    ],
    scoring_rules.conversations_are_scored_whole: [
        (["environment.name=tools", "algo.scores.truncate_at.token=1"], "algo.scores.truncate_at", "whole conversation")
    ],
    scoring_rules.scores_end_within_responses: [
        (["algo.scores.truncate_at.token=96"], "algo.scores.truncate_at.token", "below 96"),
        (["algo.scores.truncate_at={token: 3, after: 32}"], "algo.scores.truncate_at.after", "max_new_tokens = 32"),
    ],
    scoring_rules.evaluations_report_something: [
        (
            [*without("train", ["reward"]), FUNCTIONS, "evaluation={prompts: a/b}"],
            "evaluation.functions",
            "something to measure",
        )
    ],
    scoring_rules.evaluations_weigh_nothing: [
        (
            ["evaluation={prompts: a/b, functions: [{name: length}, {name: regex, weight: 2.0}]}"],
            "evaluation.functions.1.weight",
            "reports each function by itself",
        )
    ],
    scoring_rules.functions_have_their_calls: [
        (
            ["reward.functions=[{name: regex, args: {pattern: x}, per: batch}]"],
            "reward.functions.0.per",
            "no effect with a built-in function",
        ),
        (
            ["reward.functions=[{name: judge, concurrency: 4}, {name: regex, concurrency: 4}]"],
            "reward.functions.1.concurrency",
            "no effect with a built-in function",
        ),
        (["reward.functions=[{name: 'a:b', per: group, cache: true}]"], "reward.functions.0.cache", "per: group"),
        (["reward.functions=[{name: 'a:b', adapter: trl, per: response}]"], "reward.functions.0.per", "batch or group"),
        (
            ["evaluation={prompts: a/b, functions: [{name: 'a:b', adapter: verl, per: group}]}"],
            "evaluation.functions.0.per",
            "response or batch",
        ),
    ],
    scoring_rules.evaluations_sample: [
        (
            [EVALUATION, "evaluation={greedy: true, samples_per_prompt: 2}"],
            "evaluation.samples_per_prompt",
            "would all be the same",
        ),
        ([EVALUATION, "evaluation.pass_at=[2]"], "evaluation.pass_at", "at most evaluation.samples_per_prompt = 1"),
    ],
    training_rules.profiles_have_an_effect: [
        (["profile.steps=[2, 4]"], "profile.steps", "none above 3"),
        (["profile.ranks=[4]"], "profile.ranks", "none above 3"),
        (["profile.engines=[1]"], "profile.engines", "none above 0"),
        (["profile={ranks: [], engines: []}"], "profile.ranks", "a rank or an engine is profiled"),
        (["profile.ranks=[]", "rollout={tp: 2, devices: 0-1}"], "profile.ranks", "a rank or an engine is profiled"),
        (
            ["profile.engines=[0]", "rollout={tp: 2, devices: 0-1}"],
            "profile.engines",
            "processes that are not profiled",
        ),
    ],
    training_rules.health_checks_have_metrics: [
        (["health.stop=[sft/grad_norm]"], "health.stop", "a metric of stage ppo"),
        (["health.stop=[skipped, objective/kl, sft/grad_norm]"], "health.stop", "a metric of stage ppo"),
    ],
    training_rules.texts_are_mixed_in: [
        ([PTX, "ptx.coef=0"], "ptx.coef", "above 0"),
        ([PTX, "ptx={mode: convex, coef: 1.0}"], "ptx.coef", "below 1 with ptx.mode = convex"),
    ],
    data_rules.micro_batches_hold_a_sample: [
        ([PTX, "ptx.max_tokens=129"], f"{ACTOR}.tokens_per_micro_batch", "at least ptx.max_tokens = 129")
    ],
    data_rules.files_exist: [([PTX, "ptx.data=/nowhere.jsonl"], "ptx.data", "a file that exists")],
    data_rules.chat_templates_have_a_tokenizer: [
        ([PTX, "ptx.chat_template=true"], "ptx.chat_template", "needs a tokenizer")
    ],
    training_rules.rates_fall: [
        (
            ["actor.optimizer.schedule=linear", "actor.optimizer.final_lr=1e-4"],
            "actor.optimizer.final_lr",
            "below lr = 0.0001, from which a linear schedule comes down",
        ),
    ],
}
