"""Every rule between fields, broken once at least; and the choices of the schema against what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from megarl.config import ConfigError, build
from megarl.config.loading import load
from megarl.config.rules import RULES, algorithm, data, generation, model, placement, resharding, training
from megarl.config.schema import KL, STAGES, Algo
from tests.config.debug import DEBUG, debug, refused, without

ACTOR = "groups.train.roles.actor"
SPARE = ["groups.spare.devices=3-4", "cluster.devices_per_node=8"]

GRPO = [*without("train", ["critic", "reference"]), "critic=null", "algo.kl.coef=0", "algo.advantage=grpo"]
FUNCTIONS = "reward.functions=[{name: length}]"

MIXTURE = [
    "model.random.config={model_type: mixtral, num_local_experts: 6, num_experts_per_tok: 2}",
    f"{ACTOR}.sequence_parallel=true",
    "groups.train.roles.reference.sequence_parallel=true",
]

Cases = dict[Any, list[tuple[list[str], str, str]]]

# rule -> (overrides of the debug run, the field that is named, a part of the rule's text)
BROKEN: Cases = {
    placement.groups_have_roles: [([*SPARE, "groups.spare.roles={}"], "groups.spare.roles", "at least one role")],
    placement.nodes_are_joined: [
        (["cluster.nodes=2", "cluster.device=cuda"], "cluster.nodes", "need cluster.address"),
    ],
    placement.devices_exist: [
        (["groups.train.devices=4-7"], "groups.train.devices", "below nodes * devices_per_node = 4"),
    ],
    placement.groups_are_disjoint: [
        (
            [*SPARE, *without("train", ["reward"]), "groups.spare.roles.reward.tp=1"],
            "groups.spare.devices",
            "disjoint devices; 3 also in train",
        )
    ],
    placement.roles_placed_once: [
        (
            ["groups.b={devices: 4, roles: {reward: {}}}", "cluster.devices_per_node=8"],
            "groups.b.roles.reward",
            "in exactly one group",
        ),
    ],
    placement.roles_belong_to_the_stage: [(without("train", ["actor"]), "groups", "role actor")],
    placement.layouts_fill_groups: [
        ([f"{ACTOR}.tp=4"], ACTOR, "tp * pp = 8 divides the group's 4 devices"),
        (["groups.train.devices=0-2"], ACTOR, "tp * pp = 4 divides the group's 3 devices"),
    ],
    placement.experts_divide_replicas: [
        ([*MIXTURE, f"{ACTOR}={{tp: 1, pp: 1, ep: 3}}"], f"{ACTOR}.ep", "the role's 4 replicas"),
        ([*MIXTURE, f"{ACTOR}.ep=2"], f"{ACTOR}.ep", "the role's 1 replicas"),
    ],
    placement.interleaving_needs_stages: [([f"{ACTOR}.pp=1", f"{ACTOR}.vpp=2"], f"{ACTOR}.vpp", "needs pp of 2")],
    placement.sequence_parallel_needs_tp: [
        ([f"{ACTOR}.tp=1", f"{ACTOR}.sequence_parallel=true"], f"{ACTOR}.sequence_parallel", "with tp above 1 alone")
    ],
    placement.recomputation_is_for_a_backward_pass: [
        (["groups.train.roles.reference.recompute=full"], "groups.train.roles.reference.recompute", "actor, critic"),
        (["groups.train.roles.reward.recompute=selective"], "groups.train.roles.reward.recompute", "actor, critic"),
    ],
    placement.offloading_frees_devices: [
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
    generation.engine_devices_exist: [(["cluster.nodes=2", "rollout.devices=8"], "rollout.devices", "= 8")],
    generation.engines_fill_devices: [
        (["rollout.devices=0-2", "rollout.tp=2"], "rollout.tp", "divides the 3 rollout devices"),
        (
            ["rollout.devices=3-4", "rollout.tp=2", "cluster.nodes=2"],
            "rollout.devices",
            "within a node; one would have devices 3, 4",
        ),
    ],
    generation.sleeping_frees_devices: [
        (
            ["rollout.sleep=true", "rollout.devices=4", "cluster.devices_per_node=5"],
            "rollout.sleep",
            "has devices of the engines",
        )
    ],
    generation.new_tokens_in_order: [(["rollout.min_new_tokens=33"], "rollout.min_new_tokens", "at most")],
    generation.stops_can_be_met: [
        (["rollout.stop=[x]"], "rollout.stop", "needs a tokenizer"),
        (["rollout.stop=[a, '']", "model.tokenizer=somewhere"], "rollout.stop", "empty text"),
        (["rollout.stop_token_ids=[3, 96]"], "rollout.stop_token_ids", "below 96"),
    ],
    generation.quantized_models: [
        (["rollout.quantization=fp8_per_channel"], "rollout.quantization", "bfloat16 or float16; it is of float32"),
        (
            [*MIXTURE, "model.random.config.dtype=bfloat16", "rollout.quantization=fp8_per_channel"],
            "rollout.quantization",
            "experts on a CPU",
        ),
    ],
    resharding.transports_are_for_the_cpu: [
        (
            ["resharding.transport=gloo", "cluster.device=cuda"],
            "resharding.transport",
            "auto where cluster.device is cuda",
        )
    ],
    resharding.shared_memory_stays_within_a_node: [
        (
            ["resharding.transport=shared_memory", "cluster.nodes=2", "rollout.devices=0,4"],
            "resharding.transport",
            "actor and engines are on nodes 0, 1",
        )
    ],
    generation.record_or_replay: [
        (["rollout.replay=/nowhere"], "rollout.replay", "a directory that exists"),
        (["rollout.replay=.", "rollout.record=."], "rollout.record", "not together"),
    ],
    model.one_model_source: [
        (["model.random=null"], "model", "exactly one"),
        (["model.path=/nowhere"], "model", "exactly one"),
    ],
    model.checkpoints_are_readable: [
        (["model={path: /nowhere, random: null}"], "model.path", "readable config.json"),
        (["reward.path=/nowhere"], "reward.path", "readable config.json"),
        (["critic.path=/nowhere"], "critic.path", "readable config.json"),
    ],
    model.architecture_is_known: [
        (["model.random.config.model_type=opt"], "model.random.config.model_type", "one of llama, mistral, qwen2"),
        (["model.random.config.vocab_size=null"], "model.random.config.vocab_size", "required"),
    ],
    model.layouts_split_the_model: [
        (["model.random.config.num_attention_heads=5"], f"{ACTOR}.tp", "num_attention_heads = 5"),
        (
            ["model.random.config={num_attention_heads: 6, num_key_value_heads: 3}"],
            f"{ACTOR}.tp",
            "divides, or is a multiple of, the model's num_key_value_heads = 3",
        ),
        (["model.random.config.intermediate_size=127"], f"{ACTOR}.tp", "intermediate_size = 127"),
        (["model.random.config.num_hidden_layers=1"], f"{ACTOR}.pp", "pp * vpp = 2 is at most"),
        ([f"{ACTOR}.vpp=4"], f"{ACTOR}.pp", "pp * vpp = 8 is at most the model's num_hidden_layers = 4"),
    ],
    model.experts_are_split: [
        ([f"{ACTOR}={{tp: 1, ep: 2}}"], f"{ACTOR}.ep", "needs a mixture of experts; the model is of kind qwen2"),
        ([*MIXTURE, "groups.train.roles.reference={tp: 1, ep: 4}"], "groups.train.roles.reference.ep", "experts = 6"),
    ],
    model.experts_need_sequence_parallel: [
        ([*MIXTURE, f"{ACTOR}.sequence_parallel=false"], f"{ACTOR}.sequence_parallel", "with tp above 1 needs")
    ],
    model.engines_split_the_model: [
        (["rollout.devices=0-2", "rollout.tp=3"], "rollout.tp", "num_attention_heads = 4"),
        (
            ["rollout.devices=0-3", "rollout.tp=4", "model.random.config.num_key_value_heads=6"],
            "rollout.tp",
            "divides, or is a multiple of",
        ),
    ],
    model.engines_have_an_attention_kernel: [
        (["model.random.config.hidden_size=64"], "cluster.device", "the model's have 16"),
        (["model.random.config.head_dim=48"], "cluster.device", "the model's have 48"),
    ],
    model.positions_cover_lengths: [
        (["rollout.max_model_len=129"], "rollout.max_model_len", "max_position_embeddings = 128")
    ],
    model.checkpoints_share_the_tokens: [],  # in a test of its own: it needs a checkpoint
    data.files_exist: [
        (["data.random=null", "data.prompts=/nowhere.jsonl"], "data.prompts", "a file that exists"),
        (["data.random=null", "data.prompts=data.csv"], "data.prompts", "ends in .jsonl or .parquet"),
        (["data.random=null", "data.prompts={path: p.parquet, split: train}"], "data.prompts.split", "this is a file"),
        (["evaluation={prompts: /nowhere.jsonl}"], "evaluation.prompts", "a file that exists"),
    ],
    data.chat_templates_have_a_tokenizer: [
        (["data.random=null", "data.prompts=a/b", "data.chat_template=true"], "data.chat_template", "needs a tokenizer")
    ],
    data.one_prompt_source: [
        (["data.random=null"], "data", "exactly one"),
        (["data.prompts=a/b"], "data", "exactly one"),
        (["data.random.min_tokens=17"], "data.random.min_tokens", "max_tokens = 16"),
        (["data.random.count=7"], "data.random.count", "prompts_per_step = 8"),
    ],
    data.random_prompts_are_ids: [
        (["data.chat_template=true"], "data.chat_template", "no effect with data.random"),
        (["data.too_long=drop"], "data.too_long", "no effect with data.random"),
    ],
    data.mini_batches_are_equal: [(["algo.mini_batches=3"], "algo.mini_batches", "= 16")],
    data.lengths_fit: [(["rollout.max_new_tokens=49"], "rollout.max_model_len", "max_new_tokens = 49")],
    data.micro_batches_hold_a_sample: [
        ([f"{ACTOR}.tokens_per_micro_batch=63"], f"{ACTOR}.tokens_per_micro_batch", "max_model_len = 64")
    ],
    algorithm.advantages_have_their_critic: [
        (without("train", ["critic"]), "algo.advantage", "role critic"),
        (["critic=null"], "critic", "needs the section critic"),
        (["algo.advantage=grpo"], "groups.train.roles.critic", "has no critic"),
        (["algo.advantage=grpo"], "critic", "no effect with advantage grpo"),
    ],
    algorithm.groups_of_samples_are_compared: [
        ([*GRPO, "data.samples_per_prompt=1"], "data.samples_per_prompt", "at least 2")
    ],
    algorithm.grpo_is_of_outcomes: [
        ([*GRPO, "algo.kl.coef=0.1"], "algo.kl.in", "loss with advantage grpo"),
        ([*GRPO, "algo.lam=1.0"], "algo.lam", "no effect with advantage grpo"),
        ([*GRPO, "algo.whiten_advantages=false"], "algo.whiten_advantages", "no effect with advantage grpo"),
        ([*GRPO, "algo.value_clip=null"], "algo.value_clip", "no effect with advantage grpo"),
    ],
    algorithm.penalty_has_a_reference: [
        (without("train", ["reference"]), "algo.kl.coef", "needs the role reference"),
        (["algo.kl.coef=0"], "algo.kl.coef", "no effect otherwise"),
    ],
    algorithm.penalty_is_one: [
        ([*GRPO, "algo.kl.in=loss"], "algo.kl.in", "no effect with algo.kl.coef = 0"),
        ([*GRPO, "algo.kl.target=6.0"], "algo.kl.target", "no effect with algo.kl.coef = 0"),
        (["algo.kl.horizon=100.0"], "algo.kl.horizon", "no effect without algo.kl.target"),
    ],
    algorithm.penalty_in_the_loss_pulls: [(["algo.kl.in=loss"], "algo.kl.estimator", "k2 or k3")],
    algorithm.scores_have_a_source: [(without("train", ["reward"]), "reward", "reward.functions has a rule")],
    algorithm.reward_settings_have_their_model: [
        ([*without("train", ["reward"]), FUNCTIONS, "reward.path=x"], "reward.path", "no effect without the role"),
        ([*without("train", ["reward"]), FUNCTIONS, "reward.weight=2.0"], "reward.weight", "no effect without"),
        (["reward.path=x", "reward.head_seed=4"], "reward.head_seed", "whose head is loaded"),
    ],
    algorithm.processes_have_functions: [(["reward.processes=2"], "reward.processes", "no effect without functions")],
    algorithm.head_seed_draws_a_head: [(["critic.head_seed=1"], "critic.head_seed", "critic.head_std = 0")],
    algorithm.evaluations_report_something: [
        (
            [*without("train", ["reward"]), FUNCTIONS, "evaluation={prompts: a/b}"],
            "evaluation.functions",
            "the role reward",
        )
    ],
    algorithm.evaluations_weigh_nothing: [
        (
            ["evaluation={prompts: a/b, functions: [{name: length}, {name: regex, weight: 2.0}]}"],
            "evaluation.functions.1.weight",
            "reports each function by itself",
        )
    ],
    training.actor_rate_falls: [
        (["actor.optimizer.final_lr=1e-5"], "actor.optimizer.final_lr", "no effect with a constant schedule"),
        (
            ["actor.optimizer.schedule=linear", "actor.optimizer.final_lr=1e-4"],
            "actor.optimizer.final_lr",
            "below lr = 0.0001, from which a linear schedule comes down",
        ),
    ],
    training.critic_rate_falls: [(["critic.optimizer.final_lr=1e-5"], "critic.optimizer.final_lr", "no effect")],
}

BROKEN_SFT: Cases = {
    placement.roles_belong_to_the_stage: [
        (["groups.train.roles.critic={}"], "groups.train.roles.critic", "stage sft has the roles actor alone")
    ],
    placement.offloading_frees_devices: [([f"{ACTOR}.offload=true"], f"{ACTOR}.offload", "another role")],
    model.positions_cover_lengths: [(["data.max_tokens=129"], "data.max_tokens", "max_position_embeddings = 128")],
    data.files_exist: [
        (["data.evaluation=/nowhere.parquet"], "data.evaluation", "a file that exists"),
        (["data.train={path: x.jsonl, subset: main}"], "data.train.subset", "this is a file"),
    ],
    data.micro_batches_hold_a_sample: [
        (["data.max_tokens=129"], f"{ACTOR}.tokens_per_micro_batch", "data.max_tokens = 129")
    ],
    generation.nothing_to_show: [(["tracking.samples=8"], "tracking.samples", "stage ppo alone")],
    data.evaluations_have_rows: [
        (["data.evaluation=null", "data.evaluate_every=1"], "data.evaluate_every", "data.evaluation alone")
    ],
    training.actor_rate_falls: [
        (["actor.optimizer.final_lr=1e-3"], "actor.optimizer.final_lr", "a linear schedule comes down")
    ],
}

REWARD = "groups.train.roles.reward"

BROKEN_REWARD_MODEL: Cases = {
    placement.roles_belong_to_the_stage: [
        (["groups.train.roles.actor={}"], ACTOR, "stage reward_model has the roles reward alone"),
        (["groups.train.roles={reward: null, actor: {}}"], "groups", "role reward"),
    ],
    generation.engine_devices_exist: [(["rollout.devices=7"], "rollout.devices", "= 4")],
    generation.nothing_to_record: [(["rollout.record=x"], "rollout.record", "stage ppo alone")],
    generation.nothing_to_show: [(["tracking.samples=0"], "tracking.samples", "stage ppo alone")],
    model.layouts_split_the_model: [(["model.random.config.num_attention_heads=5"], f"{REWARD}.tp", "= 5")],
    data.files_exist: [(["normalisation.prompts=/nowhere.jsonl"], "normalisation.prompts", "a file that exists")],
    data.lengths_fit: [(["rollout.max_model_len=32"], "rollout.max_model_len", "a prompt (1 tokens)")],
    data.micro_batches_hold_a_sample: [
        (["data.max_tokens=65"], f"{REWARD}.tokens_per_micro_batch", "twice data.max_tokens, for a pair, = 130")
    ],
    data.evaluations_have_rows: [
        (["data.evaluation=null", "data.evaluate_every=1"], "data.evaluate_every", "data.evaluation alone")
    ],
    data.reference_samples_have_engines: [
        (["rollout=null"], "normalisation", "needs the section rollout"),
        (["normalisation=null"], "rollout", "normalisation alone"),
    ],
    training.reward_rate_falls: [(["reward.optimizer.lr=1e-4"], "reward.optimizer.final_lr", "below lr = 0.0001")],
}

ALL = {"ppo": BROKEN, "sft": BROKEN_SFT, "reward_model": BROKEN_REWARD_MODEL}


def test_every_rule_is_here() -> None:
    for stage, rules in RULES.items():
        assert set(rules) >= set(ALL[stage])
    assert {rule for cases in ALL.values() for rule in cases} == {rule for rules in RULES.values() for rule in rules}


@pytest.mark.parametrize(
    ("stage", "overrides", "field", "rule"),
    [(stage, *case) for stage, broken in ALL.items() for cases in broken.values() for case in cases],
    ids=lambda part: str(part),
)
def test_a_broken_rule_is_reported(stage: str, overrides: list[str], field: str, rule: str) -> None:
    assert rule in refused(*overrides, stage=stage)[field]


@pytest.mark.parametrize(
    "overrides",
    [
        GRPO,
        [*without("train", ["reference"]), "algo.kl.coef=0"],
        [*without("train", ["reward"]), FUNCTIONS, "reward.processes=2"],
        [*without("train", ["critic"]), "critic=null", "algo.advantage=grpo", "algo.kl={in: loss, estimator: k3}"],
        ["algo.kl={in: loss, estimator: k2}", f"{ACTOR}.recompute=full"],
        ["algo.kl={target: 6.0, horizon: 100.0}"],
        ["actor.optimizer={schedule: cosine, final_lr: 1e-5, warmup: 0.1}"],
        [f"{ACTOR}.offload=true", "rollout.sleep=true"],
        ["evaluation={prompts: a/b, every: 2}"],
        ["model.random.config={num_key_value_heads: 1, num_hidden_layers: 3}"],
        MIXTURE,
        [*MIXTURE, f"{ACTOR}={{pp: 1, ep: 2}}", "groups.train.roles.reference.ep=2"],
    ],
    ids=str,
)
def test_what_belongs_together_is_accepted(overrides: list[str]) -> None:
    assert debug(*overrides) != debug()


def checkpoint(directory: Path, **changes: object) -> Path:
    """A directory with the debug model's config.json."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**debug().model.hf_config(), **changes}))
    return directory


def test_a_checkpoint_is_checked_like_a_random_model(tmp_path: Path) -> None:
    good = checkpoint(tmp_path / "good")
    assert debug(f"model={{path: {good}, random: null}}").model.hf_config()["hidden_size"] == 128
    odd = checkpoint(tmp_path / "odd", num_hidden_layers=1)
    assert "num_hidden_layers = 1" in refused(f"model={{path: {odd}, random: null}}")[f"{ACTOR}.pp"]


def test_a_checkpoint_of_a_role_is_checked_against_its_own_sizes_and_the_vocabulary(tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "other", num_attention_heads=3, vocab_size=95, max_position_embeddings=63)
    for role in ("reward", "critic"):
        rules = refused(f"{role}.path={other}", f"groups.train.roles.{role}={{tp: 2, pp: 1}}")
        assert "num_attention_heads = 3" in rules[f"groups.train.roles.{role}.tp"]
        assert "knows the 96 token ids in use; it has 95" in rules[f"{role}.path"]
        assert f"{role}.path's max_position_embeddings = 63" in rules["rollout.max_model_len"]


def raw() -> dict[str, Any]:
    return load(DEBUG).model_dump(by_alias=True)


@given(devices=st.integers(1, 24), tp=st.integers(1, 12), pp=st.integers(1, 12))
def test_a_layout_is_accepted_exactly_if_whole_replicas_fill_the_group(devices: int, tp: int, pp: int) -> None:
    config = raw()
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 144, "num_hidden_layers": 12}
    config["model"]["random"]["config"].update(sizes, hidden_size=384)
    config["cluster"]["devices_per_node"] = 24
    budget = {"tokens_per_micro_batch": 64}
    roles = {"actor": {"tp": tp, "pp": pp, **budget}, "critic": budget, "reference": budget, "reward": budget}
    config["groups"] = {"train": {"devices": f"0-{devices - 1}", "roles": roles}}
    replicas = [dp for dp in range(1, 25) if tp * pp * dp == devices]
    if replicas and tp in (1, 2, 3, 4, 6, 12):
        layout = build(config).layout("actor")
        assert (layout.tp, layout.pp, layout.dp, layout.world_size) == (tp, pp, replicas[0], devices)
    else:
        with pytest.raises(ConfigError):
            build(config)


def fields(schema: type[BaseModel]) -> list[str]:
    """The leaves of a schema, with the description of every field checked on the way."""
    leaves: list[str] = []
    for name, info in schema.model_fields.items():
        assert info.description, f"{schema.__name__}.{name} has no description"
        below = [part for part in _types(info.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        leaves.extend(f"{name}.{leaf}" for part in below for leaf in fields(part))
        if not below:
            leaves.append(name)
    return leaves


def _types(annotation: Any) -> list[Any]:
    return [annotation, *(part for argument in get_args(annotation) for part in _types(argument))]


@pytest.mark.parametrize("stage", STAGES)
def test_fields_are_described_and_few(stage: str) -> None:
    leaves = fields(STAGES[stage])
    assert "groups.roles.tp" in leaves
    assert len(leaves) < 150


def choices(schema: type[BaseModel], field: str) -> set[str]:
    return set(get_args(schema.model_fields[field].annotation))


def test_choices_are_what_the_algorithms_have() -> None:
    from megarl.algos import registry

    assert choices(KL, "estimator") == set(registry.KL_ESTIMATORS)
    assert choices(Algo, "advantage") == {*registry.ADVANTAGES, *registry.OUTCOME_ADVANTAGES}
    assert choices(Algo, "policy_loss") == set(registry.POLICY_LOSSES)
    assert choices(Algo, "aggregation") == set(registry.AGGREGATIONS)


def test_model_types_are_those_with_a_weight_spec() -> None:
    from megarl.weights.specs import FAMILIES

    assert set(model.MODEL_TYPES) == set(FAMILIES)
