"""Every rule of stage ppo on placement, models, engines and data, broken at least once."""

from __future__ import annotations

from megarl.config.rules import data_rules, model_rules, placement_rules, rollout_rules, training_rules
from tests.config.debug import ACTOR, JUDGE, MIXTURE, PTX, SPARE, Cases, without

LAYOUTS: Cases = {
    placement_rules.threads_are_used: [
        (
            ["cluster.device=cuda", "cluster.threads_per_device=2"],
            "cluster.threads_per_device.engines",
            "no effect with device cuda",
        )
    ],
    placement_rules.groups_have_roles: [([*SPARE, "groups.spare.roles={}"], "at least one role")],
    placement_rules.devices_exist: [
        (["rollout.max_new_tokens=x", "groups.train.devices=4-7"], "below nodes * devices_per_node = 4"),
    ],
    placement_rules.engine_devices_exist: [
        (["groups.train.devices=[]", "cluster.nodes=2", "rollout.devices=8"], "= 8"),
    ],
    placement_rules.groups_are_disjoint: [
        (
            [*SPARE, *without("train", ["reward"]), "groups.spare.roles.reward.tp=1"],
            "groups.spare.devices",
            "disjoint devices; 3 also in train",
        )
    ],
    placement_rules.judges_have_devices: [
        ([*JUDGE, "reward.judge_model.devices=9"], "nodes * devices_per_node = 7"),
        ([*JUDGE, "reward.judge_model.devices=3"], "groups or engines have 3, too"),
        ([*JUDGE, "reward.judge_model.tp=2"], "must divide the 3 devices"),
    ],
    placement_rules.roles_placed_once: [
        (
            ["groups.b={devices: 4, roles: {reward: {}}}", "cluster.devices_per_node=8"],
            "groups.b.roles.reward",
            "in exactly one group",
        )
    ],
    placement_rules.roles_belong_to_the_stage: [(without("train", ["actor"]), "groups", "role actor")],
    placement_rules.layouts_fill_groups: [
        ([f"{ACTOR}.tp=4"], ACTOR, "tp * pp = 8 must divide the group's 4 devices"),
        (["groups.train.devices=0-2"], ACTOR, "tp * pp = 4 must divide the group's 3 devices"),
        ([*MIXTURE, f"{ACTOR}={{tp: 1, pp: 1, ep: 3}}"], f"{ACTOR}.ep", "the role's 4 replicas"),
        ([*MIXTURE, f"{ACTOR}.ep=2"], "the role's 1 replicas"),
        ([f"{ACTOR}.pp=1", f"{ACTOR}.vpp=2"], "needs pp of 2"),
        ([f"{ACTOR}.tp=1", f"{ACTOR}.sequence_parallel=true"], "with tp above 1 alone"),
    ],
    placement_rules.recomputation_is_for_a_backward_pass: [
        (["groups.train.roles.reference.recompute=full"], "actor, critic"),
        (["groups.train.roles.reward.recompute=selective"], "actor, critic"),
    ],
    placement_rules.offloading_frees_devices: [
        (
            [
                *without("train", ["critic"]),
                "groups.critic={devices: 4-5, roles: {critic: {pp: 2, offload: true, tokens_per_micro_batch: 128}}}",
                "cluster.devices_per_node=6",
            ],
            "groups.critic.roles.critic.offload",
            "another role or an engine",
        )
    ],
    rollout_rules.engines_fill_devices: [
        (["rollout.devices=0-2", "rollout.tp=2"], "must divide the 3 devices of rollout.devices"),
        (["rollout.tp=2", "cluster.nodes=2", "rollout.devices=3-4"], "within a node; one would have devices 3, 4"),
    ],
    rollout_rules.sleeping_frees_devices: [
        (["rollout.devices=4", "cluster.devices_per_node=5", "rollout.sleep=true"], "has devices of the engines")
    ],
    rollout_rules.stops_can_be_met: [
        (["model.tokenizer=somewhere", "rollout.stop=[a, '']"], "empty text"),
        (["algo.kl.coef=x", "rollout.stop_token_ids=[3, 96]"], "below 96"),
    ],
    rollout_rules.quantized_models: [
        (["rollout.quantization=fp8_per_channel"], "bfloat16 or float16; it is of float32"),
        ([*MIXTURE, "model.random.config.dtype=bfloat16", "rollout.quantization=fp8_per_channel"], "experts on a CPU"),
    ],
    rollout_rules.transports_are_for_the_cpu: [
        (["cluster.device=cuda", "resharding.transport=gloo"], "auto where cluster.device is cuda"),
        (["resharding.transport=tcp"], "or a class, written as package.module:Class"),
    ],
    rollout_rules.shared_memory_stays_within_a_node: [
        (
            ["cluster.nodes=2", "rollout.devices=0,4", "resharding.transport=shared_memory"],
            "actor and engines are on nodes 0, 1",
        )
    ],
    rollout_rules.replayed_rollouts_exist: [(["rollout.replay=/nowhere"], "a directory that exists")],
    model_rules.checkpoints_are_readable: [
        (["model={path: /nowhere, random: null}"], "model.path", "readable config.json"),
        (["reward.path=/nowhere"], "readable config.json"),
        (["critic.path=/nowhere"], "readable config.json"),
    ],
    model_rules.checkpoints_share_the_tokens: [],  # in tests of their own: they need checkpoints
    placement_rules.run_directories_can_be_made: [
        (["run.dir=README.md"], "README.md is a file"),
        (["run.dir=README.md/run"], "README.md is a file"),
        (["run.dir=nowhere/../../runs"], "made; nowhere, before .., does not exist"),
        (["run.dir=~/runs/x"], "~ is not read as a home directory"),
    ],
    data_rules.sources_exist: [
        (["data.random=null", "data.prompts=/nowhere.jsonl"], "a file that exists"),
        (["data.random=null", "data.prompts=nope"], "a file that exists"),
        (["data.random=null", "data.prompts=data.csv"], "ends in .jsonl or .parquet"),
        (["data.random=null", "data.prompts={path: p.parquet, split: train}"], "data.prompts.split", "this is a file"),
    ],
    data_rules.random_prompts_are_ids: [
        (["data.chat_template=true"], "no effect with data.random"),
        (["data.too_long=drop"], "no effect with data.random"),
        (["data.random=null", "data.tasks=8", "data.too_long=drop"], "no effect with data.tasks"),
        (
            ["data={random: null, tasks: 8, too_long: drop}", "evaluation={tasks: 4}", "environment.name=openenv"],
            "data.too_long",
            "no effect with data.tasks",
        ),
        ([PTX, "data.chat_template=true"], "no effect with data.random"),
    ],
    training_rules.samples_fill_mini_batches: [(["algo.mini_batches=3"], "= 16")],
    data_rules.lengths_fit: [(["rollout.max_new_tokens=49"], "rollout.max_model_len", "max_new_tokens = 49")],
    data_rules.micro_batches_hold_a_sample: [([f"{ACTOR}.tokens_per_micro_batch=63"], "max_model_len = 64")],
}
