"""Every entry of the tables of rules, broken at least once."""

from __future__ import annotations

from tests.config.debug import EVALUATION, FUNCTIONS, GRPO, HELD_OUT_TASKS, JUDGE, OWN_DEVICE, PTX, Case

ADVANTAGES = "algo.normalise.advantages"
NO_REWARD = ["groups.train.roles.reward=null", FUNCTIONS]
OLD = "algo.correction.old_logprobs"
REJECT = "algo.correction.reject=[{statistic: token_k2, upper: 1}]"

# stage, overrides of its debug run, the setting that needs a tokenizer
TEXT_CASES = [
    ("ppo", [], "rollout.stop=[x]"),
    ("ppo", ["data.random=null", "data.prompts=a/b"], "data.chat_template=true"),
    ("eval", [], "evaluation.chat_template=true"),
    ("ppo", [PTX], "ptx.chat_template=true"),
    ("ppo", [], "environment={name: tools}"),
    ("ppo", [], JUDGE[0]),
]

# overrides of the debug run, the setting, and the limit
ORDER_CASES = [
    (
        ["algo.correction.weights.name=token_mask"],
        "algo.correction.weights.lower=2.0",
        "weights.upper = 2.0",
    ),
    (["algo.filter.name=open_range"], "algo.filter.low=1.0", "below algo.filter.high = 1.0"),
    (["algo.scores.truncate_at.token=3"], "algo.scores.truncate_at.after=32", "below rollout.max_new_tokens = 32"),
    (["cluster.address=auto"], "cluster.min_nodes=1", "below cluster.nodes = 1"),
    ([], "data.random.count=7", "at least data.prompts_per_step = 8"),
    ([], "data.random.min_tokens=17", "at most data.random.max_tokens = 16"),
    (["data.random=null"], "data.tasks=7", "at least data.prompts_per_step = 8"),
    (["environment.name=tools"], "environment.time_limit=4000", "at most cluster.time_limits.rollout = 3600.0"),
    (JUDGE, "reward.judge_model.max_new_tokens=8192", "below reward.judge_model.max_model_len = 8192"),
    ([], "rollout.min_new_tokens=33", "at most rollout.max_new_tokens = 32"),
]

# stage, overrides of its debug run, the setting, and the condition
TOKENS = "without an advantage of token rewards"
UNUSED_CASES: list[tuple[str, list[str], str, str]] = [
    ("ppo", GRPO, "algo.normalise.rewards=true", TOKENS),
    ("ppo", GRPO, "algo.scores.placement=every_valid", TOKENS),
    ("ppo", [*GRPO, "algo.advantage=rloo"], "reward.dense=scores", TOKENS),
    ("ppo", [], "algo.kl.cumulative=false", "with an advantage of token rewards"),
    ("ppo", NO_REWARD, "reward.path=x", "without the role reward"),
    ("ppo", NO_REWARD, "reward.weight=2.0", "without the role reward"),
    ("ppo", NO_REWARD, "reward.dense=scores", "without the role reward"),
    ("eval", [], "reward.path=x", "without the role reward"),
    ("eval", [], "reward.functions=[{name: regex}]", "without training"),
    ("eval", [], "reward.shuffle=true", "without training"),
    ("eval", ["environment.name=tools"], "environment.weight=2.0", "without training"),
    ("eval", [JUDGE[0], "cluster.devices_per_node=7"], "reward.judge_model.weight=2.0", "without training"),
    ("sft", [], "tracking.samples=8", "without rollouts"),
    ("sft", [], "tracking.tokens=true", "without rollouts"),
    ("sft", [], "tracking.samples_mib=8", "without rollouts"),
    ("reward_model", [], "tracking.samples=0", "without rollouts"),
    ("reward_model", [], "rollout.record=x", "without training on rollouts"),
    ("reward_model", [], "rollout.sync_every=2", "without training on rollouts"),
    ("reward_model", [], "rollout.max_staleness=1", "without training on rollouts"),
    ("eval", [], "rollout.replay=x", "without training on rollouts"),
    ("eval", ["rollout.max_staleness=1"], "rollout.mode=inflight", "without training on rollouts"),
    ("eval", [], "rollout.max_replacements=1", "without training on rollouts"),
    ("eval", [], "rollout.inference_parts=2", "without training on rollouts"),
    ("ppo", [], "algo.filter_rounds=3", "without algo.filter"),
    ("ppo", ["algo.ppo_epochs=1"], "algo.early_stop={kl: 0.1}", "with algo.ppo_epochs = 1"),
    ("ppo", GRPO, "algo.value_loss=huber", "without critic"),
    ("raft", [], "algo.correction={old_logprobs: rollout}", "with algo.policy_loss = sft"),
    ("ppo", ["algo.advantage={name: vapo, lam_policy: 0.9}"], "algo.advantage.length_alpha=0.1", "lam_policy"),
    ("ppo", [f"{OLD}=rollout"], "algo.correction.weights=token_mask", f"with {OLD} = rollout"),
    ("ppo", [f"{OLD}=rollout"], "algo.correction.m2po={}", f"with {OLD} = rollout"),
    ("ppo", [f"{OLD}=rollout"], REJECT, f"with {OLD} = rollout"),
    ("ppo", [f"{OLD}=linear"], REJECT, f"with {OLD} = linear"),
    ("ppo", [f"{OLD}=loglinear"], "algo.correction.m2po={}", f"with {OLD} = loglinear"),
    ("ppo", GRPO, "algo.kl.reference_sync={every: 5}", "with algo.kl.coef = 0"),
    ("ppo", [], "algo.kl.horizon=100.0", "without algo.kl.target"),
    ("ppo", [], "algo.kl.unit=token_mean", "without algo.kl.target"),
    ("ppo", ["algo.kl={in: loss, estimator: k3}"], "algo.kl.cumulative=false", "with algo.kl.in = loss"),
    ("ppo", [], "algo.kl.importance=true", "with algo.kl.in = reward"),
    ("ppo", ["algo.kl={in: loss, estimator: full}"], "algo.kl.importance=true", "with algo.kl.estimator = full"),
    (
        "ppo",
        [f"{ADVANTAGES}={{name: whiten, mean_only: true}}"],
        f"{ADVANTAGES}.ddof=1",
        f"with {ADVANTAGES}.mean_only",
    ),
    ("ppo", [f"{ADVANTAGES}={{name: levels, mean: null}}"], f"{ADVANTAGES}.leave_one_out=true", f"{ADVANTAGES}.mean"),
    ("ppo", [f"{ADVANTAGES}={{name: levels, std: null}}"], f"{ADVANTAGES}.unbiased=false", f"without {ADVANTAGES}.std"),
    ("ppo", ["reward.dense=scores"], "algo.scores.placement=every_valid", "with reward.dense"),
    ("ppo", [*GRPO, "algo.advantage=gdpo"], "algo.scores.clip=2", "with algo.advantage = gdpo"),
    ("ppo", ["cluster={nodes: 2, devices_per_node: 2}"], "cluster.min_nodes=1", "without cluster.address"),
    ("ppo", ["critic={head: loaded, path: x}"], "critic.head_std=0.1", "with critic.head = loaded"),
    ("ppo", [], "critic.head_seed=1", "with critic.head_std = 0"),
    ("ppo", ["data.random=null"], "data.tasks=8", "without environment"),
    ("sft", ["data.evaluation=null"], "data.evaluate_every=1", "without data.evaluation"),
    ("ppo", [EVALUATION], "evaluation.tasks=4", "without environment"),
    ("eval", [], "evaluation.first_task=4", "without evaluation.tasks"),
    ("eval", HELD_OUT_TASKS, "evaluation.too_long=drop", "with evaluation.tasks"),
    ("ppo", [EVALUATION, "evaluation.greedy=true"], "evaluation.temperature=0.5", "with evaluation.greedy"),
    ("ppo", [EVALUATION], "evaluation.success_at=0.5", "without evaluation.pass_at"),
    ("ppo", ["reward.path=x"], "reward.head_seed=4", "with reward.path"),
    ("reward_model", ["reward.loss.kind=logexp"], "reward.loss.margin=true", "with reward.loss.kind = logexp"),
    ("ppo", [], "actor.optimizer.final_lr=1e-5", "with actor.optimizer.schedule = constant"),
    ("ppo", [], "critic.optimizer.final_lr=1e-5", "with critic.optimizer.schedule = constant"),
    ("reward_model", ["reward.optimizer.schedule=anneal"], "reward.optimizer.final_lr=1e-5", "schedule = anneal"),
    ("ppo", ["rollout.gpu_memory_fraction=0.3"], "rollout.kv_cache_mib=64", "with rollout.gpu_memory_fraction"),
    ("ppo", ["rollout.ignore_eos=true"], "rollout.min_new_tokens=4", "with rollout.ignore_eos"),
    ("ppo", [], "rollout.enforce_eager=true", "with cluster.device = cpu"),
    ("ppo", [], "rollout.mode=bounded", "with rollout.max_staleness = 0"),
    ("ppo", [], "rollout.inflight_cache=keep", "with rollout.mode = exact"),
    ("ppo", [*OWN_DEVICE, "rollout={max_staleness: 1, mode: bounded}"], "rollout.inflight_cache=keep", "= bounded"),
    ("ppo", [], "rollout.rolling_update=true", "with rollout.mode = exact"),
    ("ppo", ["tracking.samples=0"], "tracking.tokens=true", "with tracking.samples = 0"),
]

ONE_SOURCE = "exactly one of"
ONE_SAMPLE = "data.samples_per_prompt=1"

# stage of the debug run, the case
CONFLICT_CASES: list[tuple[str, Case]] = [
    ("ppo", (["environment.name=a.b:C", "reward.shuffle=true"], "places the rewards of turns")),
    ("ppo", (["model={path: /nowhere, random: null}"], "reward.path", "score at random")),
    ("ppo", (["model.random=null"], "model", ONE_SOURCE)),
    ("ppo", (["model.path=/nowhere"], "model", ONE_SOURCE)),
    ("ppo", (["data.random=null"], "data", ONE_SOURCE)),
    ("ppo", (["data.prompts=a/b"], "data", ONE_SOURCE)),
    ("ppo", (["data.tasks=8"], "data", ONE_SOURCE)),
    ("ppo", (["evaluation={every: 1}"], "evaluation", ONE_SOURCE)),
    ("ppo", (["evaluation={prompts: a/b, tasks: 4}"], "evaluation", ONE_SOURCE)),
    ("raft", ([PTX], "algo.select", "null with ptx")),
    ("raft", (["reward.dense=scores"], "algo.select", "null with reward.dense")),
    ("ppo", (["reward.dense=scores", "algo.filter=nonzero_std"], "null with reward.dense")),
    ("ppo", (["reward.dense=scores", "algo.scores.truncate_at={token: 1}"], "scores every token")),
    ("ppo", (["environment.name=a.b:C", "algo.scores.truncate_at={token: 1}"], "whole conversation")),
    ("ppo", (["reward.dense=differences", "reward.shuffle=true"], "fit no other response")),
    ("raft", (["groups.train.roles.reference={}", "algo.kl.coef=0.1"], "0 with policy loss sft")),
    ("ppo", (["algo.kl.in=loss"], "algo.kl.estimator", "the gradient of k1 is 0 on average")),
    ("ppo", (["algo.kl.estimator=full"], "full needs the whole distribution")),
    ("ppo", (["algo.kl.estimator=k1+"], "differs from k1 in its gradient alone")),
    ("ppo", (["algo.kl.estimator=k3+"], "differs from k3 in its gradient alone")),
    ("ppo", ([f"{ADVANTAGES}={{name: levels, mean: null, std: null}}"], "must shift or")),
    ("ppo", ([f"{OLD}=linear"], "no rollout is older than the actor")),
    (
        "ppo",
        (
            [f"{OLD}=loglinear", "algo.correction.weights={name: token_mask, batch_normalise: true}"],
            "algo.correction.weights.batch_normalise",
            "change in each micro-batch",
        ),
    ),
    ("ppo", (["rollout.max_staleness=1", "algo.policy_loss=reinforce"], "a loss with a clip")),
    ("raft", ([ONE_SAMPLE], "at least 2 with algo.select.by = local")),
    ("ppo", (["algo.filter=nonzero_std", ONE_SAMPLE], "a sample alone has no deviation")),
    ("ppo", ([f"{ADVANTAGES}=grouped_tokens", ONE_SAMPLE], "over the samples of a prompt")),
    ("ppo", ([f"{ADVANTAGES}={{name: levels, mean: group}}", ONE_SAMPLE], "over the samples")),
    ("ppo", ([f"{ADVANTAGES}={{name: levels, std: group}}", ONE_SAMPLE], "over the samples")),
    ("ppo", (["rollout.top_k=1"], "data.samples_per_prompt", "would all be the same")),
    ("eval", (["rollout.top_k=1"], "evaluation.samples_per_prompt", "rollout.top_k = 1: ")),
    ("eval", (["evaluation.greedy=true"], "evaluation.samples_per_prompt", "1 with evaluation.greedy")),
    ("ppo", (["evaluation={tasks: 4}", "environment.name=a.b:C"], "evaluation.tasks", "must follow data.tasks")),
    ("eval", ([*HELD_OUT_TASKS, "evaluation.first_task=null"], "given with evaluation.tasks")),
    ("ppo", (["environment.name=tools"], "data.random", "null with an environment")),
    ("ppo", (["run.steps=null"], "run.steps or run.epochs must be given")),
    ("ppo", (["critic.head=loaded"], "needs critic.path")),
    ("ppo", ([PTX, "ptx.coef=0"], "above 0")),
    ("ppo", ([PTX, "ptx={mode: convex, coef: 1.0}"], "ptx.coef", "below 1 with ptx.mode = convex")),
    ("ppo", (["model.layers=transformer_engine"], "needs device cuda")),
    ("ppo", (["environment.name=tools", "rollout.ignore_eos=true"], "false with an environment")),
    ("ppo", (["rollout.replay=.", "rollout.record=."], "must not be given together")),
    ("ppo", (["rollout.sleep=true", "rollout.sync_every=2"], "1 with rollout.sleep")),
    ("ppo", (["rollout.max_staleness=2", "rollout.sync_every=2"], "1 with rollout.max_staleness")),
    ("ppo", ([EVALUATION, "evaluation.blocking=false"], "true with rollout.max_staleness = 0")),
]
