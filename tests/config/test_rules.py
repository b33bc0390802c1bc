"""Every rule between fields, broken at least once; and valid combinations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import ConfigError, build
from megarl.config.loading import load
from megarl.config.rules import SECTION_RULES, rules_of
from megarl.config.rules.tables import CONFLICTS, EXACTLY_ONE, ORDERED, READ_TEXT, UNUSED, Unused, condition
from megarl.config.schema import STAGES, stage_classes
from megarl.config.schema.schema_walk import has_path
from megarl.stages.ppo.config import PPOConfig
from tests.config.broken_algorithms import ALGORITHMS
from tests.config.broken_layouts import LAYOUTS
from tests.config.broken_stages import DPO, EVAL, RAFT, REWARD_MODEL, SFT
from tests.config.debug import (
    ACTOR,
    DEBUG,
    EVALUATION,
    FUNCTIONS,
    GRPO,
    MIXTURE,
    OWN_DEVICE,
    PTX,
    Case,
    Cases,
    debug,
    refused,
    without,
)
from tests.config.table_cases import CONFLICT_CASES, ORDER_CASES, TEXT_CASES, UNUSED_CASES

ALL: list[tuple[str, Cases]] = [
    ("ppo", LAYOUTS),
    ("ppo", ALGORITHMS),
    ("sft", SFT),
    ("reward_model", REWARD_MODEL),
    ("dpo", DPO),
    ("raft", RAFT),
    ("eval", EVAL),
]


def test_every_rule_is_tested() -> None:
    for stage, cases in ALL:
        rules = rules_of("ppo" if stage == "raft" else stage)
        assert {*rules, *SECTION_RULES.values()} >= set(cases)
    rules = {rule for stage in STAGES for rule in rules_of(stage)}
    assert {rule for _, cases in ALL for rule in cases} == rules.union(SECTION_RULES.values())


RULE_CASES = [(stage, case) for stage, broken in ALL for cases in broken.values() for case in cases]


@pytest.mark.parametrize(("stage", "case"), [*RULE_CASES, *CONFLICT_CASES], ids=str)
def test_a_broken_rule_is_reported(stage: str, case: Case) -> None:
    field, rule = expected(case)
    assert rule in refused(*case[0], stage=stage)[field]


def test_a_rule_that_is_broken_twice_is_reported_once() -> None:
    normaliser = "algo.normalise.advantages={name: levels, mean: group, std: group}"
    assert refused(normaliser, "data.samples_per_prompt=1")["data.samples_per_prompt"].count("at least 2") == 1


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        ("reward_model", ["rollout.sync_every=2", "checkpoint.every=3"]),
        (
            "reward_model",
            [
                "rollout.max_staleness=1",
                "rollout.mode=bounded",
                "rollout.max_replacements=2",
                "rollout.inference_parts=2",
            ],
        ),
        ("eval", ["rollout.replay=/nope", "rollout.mode=bounded", "rollout.rolling_update=true"]),
        ("eval", ["rollout.replay=.", "rollout.record=."]),
    ],
)
def test_settings_of_training_on_rollouts_break_no_other_rule(stage: str, overrides: list[str]) -> None:
    fields = {key(setting) for setting in overrides if setting.startswith("rollout.")}
    without_effect = dict.fromkeys(fields, "has no effect without training on rollouts")
    assert refused(*overrides, stage=stage) == without_effect


def expected(case: Case) -> tuple[str, str]:
    """The field that a case names, and a part of the rule's text."""
    overrides, *named, rule = case
    (field,) = named or [key(overrides[-1])]
    return field, rule


def key(setting: str) -> str:
    return setting.partition("=")[0]


@pytest.mark.parametrize(("stage", "overrides", "setting", "condition"), UNUSED_CASES, ids=str)
def test_a_setting_without_an_effect_is_reported_once(
    stage: str, overrides: list[str], setting: str, condition: str
) -> None:
    rules = refused(*overrides, setting, stage=stage)[key(setting)].splitlines()
    assert [condition in rule for rule in rules if rule.startswith("has no effect")] == [True]


@pytest.mark.parametrize(("overrides", "setting", "limit"), ORDER_CASES, ids=str)
def test_fields_are_in_order(overrides: list[str], setting: str, limit: str) -> None:
    assert limit in refused(*overrides, setting)[key(setting)]


@pytest.mark.parametrize(("stage", "overrides", "setting"), TEXT_CASES, ids=str)
def test_a_setting_that_reads_text_needs_a_tokenizer(stage: str, overrides: list[str], setting: str) -> None:
    assert "needs a tokenizer" in refused(*overrides, setting, stage=stage)[key(setting)]
    with_one = [*overrides, setting, "model.tokenizer=somewhere", "run.steps=null"]
    assert "needs a tokenizer" not in str(refused(*with_one, stage=stage))


def test_every_entry_of_the_tables_is_tested_and_names_fields() -> None:
    assert {key(setting) for *_, setting in TEXT_CASES} == set(READ_TEXT)
    assert [key(setting) for _, setting, _ in ORDER_CASES] == [field for field, *_ in ORDERED]
    named = {*READ_TEXT, *(field for row in ORDERED for field in (row[0], row[2]))}
    named |= {f"{section}.{name}" for section, names, _ in EXACTLY_ONE for name in names}
    cases = [expected(case) for _, case in CONFLICT_CASES]
    for conflict, rule, _ in CONFLICTS:
        assert any(field in conflict and text in rule for field, text in cases), rule
        named |= set(conflict)
    tested: set[Unused] = set()
    for path, rows in UNUSED.items():
        for row in rows:
            other = path + row.field if row.field.startswith(".") else row.field
            settings = [f"{path}.{name}" for name in row.settings.split()]
            named |= {*settings, other}
            words = condition(other, row.value)
            if any(key(case[2]) in settings and case[3] in words for case in UNUSED_CASES):
                tested.add(row)
    assert tested == {row for rows in UNUSED.values() for row in rows}
    paths = [path for path in named if " " not in path]  # the others are facts in words
    assert [path for path in paths if not any(has_path(schema, path) for schema in stage_classes().values())] == []


@pytest.mark.parametrize(
    "overrides",
    [
        GRPO,
        [*without("train", ["reference"]), "algo.kl.coef=0"],
        [*without("train", ["reward"]), FUNCTIONS, "reward.processes=2"],
        [*without("train", ["critic"]), "critic=null", "algo.advantage=grpo", "algo.kl={in: loss, estimator: k3}"],
        [*without("train", ["critic"]), "critic=null", "algo.advantage=rloo", "algo.kl.cumulative=false"],
        [*GRPO, "algo.advantage=remax", "data.samples_per_prompt=1"],
        [*GRPO, "algo={advantage: rloo, policy_loss: gspo, aggregation: sequence_mean}"],
        [*GRPO, "algo.advantage=a.b:c"],
        [*GRPO, "algo={advantage: gdpo, scores: {missing_end: mask}}"],
        ["algo.policy_loss={delta: 3.0, ratio_clamp: [0, 10]}"],
        ["algo.advantage={name: a.b:c, level: token}"],
        ["algo.correction={old_logprobs: loglinear, weights: token_mask}", "rollout.sync_every=3"],
        ["algo.correction={old_logprobs: loglinear, weights: token_mask}", "rollout.max_staleness=1"],
        ["rollout.max_staleness=1"],
        [*OWN_DEVICE, "rollout.max_staleness=1", EVALUATION, "evaluation={every: 1, blocking: false}"],
        [*OWN_DEVICE, "rollout.max_replacements=2"],
        [*OWN_DEVICE, "rollout.inference_parts=16"],
        [*OWN_DEVICE, "rollout={max_staleness: 4, mode: inflight, inflight_cache: keep}"],
        ["algo={policy_loss: reinforce, correction: {weights: token_truncate}}", "rollout.max_staleness=1"],
        ["algo.kl.reference_sync.every=2", "groups.train.roles.reference={tp: 2, pp: 2}"],
        ["algo.kl={in: loss, estimator: full}", "groups.train.roles.reference={tp: 2, pp: 2}"],
        ["algo={filter: nonzero_std, filter_rounds: 3, early_stop: {kl: 0.1}}"],
        [FUNCTIONS, "reward.weight=0", "cluster.time_limits.scoring=67"],
        ["model.tokenizer=x", "data={chat_template: true, too_long: drop}", EVALUATION],
        [PTX, "data.too_long=drop"],
        [PTX, "actor.ema={}", EVALUATION, "evaluation={pass_at: [1, 4], samples_per_prompt: 4}"],
        ["actor.optimizer={schedule: anneal, adam: tensorflow}", "critic={warmup_steps: 1, value_norm: {}}"],
        ["reward={dense: differences}"],
        ["algo.kl={in: loss, estimator: k2}", f"{ACTOR}.recompute=full"],
        ["algo.kl={target: 6.0, horizon: 100.0}"],
        ["rollout={max_model_len: 128, max_new_tokens: 112}"],  # exactly the positions, and the micro-batches
        ["actor.optimizer={schedule: cosine, final_lr: 1e-5, warmup: 0.1}"],
        [f"{ACTOR}.offload=true", "rollout.sleep=true"],
        ["evaluation={prompts: a/b, every: 2}"],
        ["model.random.config={num_key_value_heads: 1, num_hidden_layers: 3}"],
        MIXTURE,
        [*MIXTURE, f"{ACTOR}={{pp: 1, ep: 2}}", "groups.train.roles.reference.ep=2"],
    ],
    ids=str,
)
def test_valid_combinations_are_accepted(overrides: list[str]) -> None:
    assert debug(*overrides) != debug()


@pytest.mark.parametrize("setting", ["top_p=0.8", "top_k=20", "min_p=0.1", "min_new_tokens=4"])
@pytest.mark.parametrize("stage", ["raft", "eval"])
def test_what_reads_no_log_probabilities_of_the_engines_may_sample_some_tokens(stage: str, setting: str) -> None:
    load(DEBUG.with_stem(stage), [f"rollout.{setting}"])


def checkpoint(directory: Path, **changes: object) -> Path:
    """A directory with the debug model's config.json."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**debug().model.hf_config(), **changes}))
    return directory


def test_a_checkpoint_is_read_like_a_random_model(tmp_path: Path) -> None:
    good = checkpoint(tmp_path / "good")
    rewarded = [*without("train", ["reward"]), FUNCTIONS]
    assert debug(f"model={{path: {good}, random: null}}", *rewarded).model.hf_config()["hidden_size"] == 128


def test_a_long_path_is_shown_whole(tmp_path: Path) -> None:
    path = str(tmp_path / ("a" * 90) / "model")
    with pytest.raises(ConfigError) as error:
        debug(f"model={{path: {path}, random: null}}")
    assert path in [problem.value for problem in error.value.problems]


def test_a_checkpoint_of_a_role_is_checked_against_the_vocabulary(tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "other", vocab_size=95)
    for role in ("reward", "critic", "reference"):
        assert "must know the 96 token ids in use; it has 95" in refused(f"{role}.path={other}")[f"{role}.path"]


TAUGHT = [*without("train", ["reward", "critic"]), "critic=null", "algo.advantage=none"]
TAUGHT += ["algo.policy_loss=reinforce", "algo.scores.missing_end=null"]


def test_a_teacher_needs_no_scores_and_nothing_that_compares_them(tmp_path: Path) -> None:
    teacher = f"reference.path={checkpoint(tmp_path / 'teacher', hidden_size=64)}"
    debug(*TAUGHT, teacher)
    debug(*TAUGHT, teacher, "algo.scores.missing_end=mask")
    taught = debug(*TAUGHT, teacher, "algo.advantage=reinforce_pp")
    assert isinstance(taught, PPOConfig)
    assert not taught.has_scores
    scores = "algo.scores={clip: 3, missing_end: replace, placement: every_valid}"
    found = refused(
        *TAUGHT,
        teacher,
        scores,
        "reward.shuffle=true",
        "algo.filter=nonzero_std",
        "algo.select={by: local}",
        "data.curriculum=thompson",
    )
    shaping = [f"algo.scores.{name}" for name in ("clip", "missing_end", "placement")]
    for name in (*shaping, "algo.filter", "algo.select", "data.curriculum", "reward.shuffle"):
        assert "has no effect where nothing scores" in found[name]
    for advantage, placement in (("rloo", "reward"), ("reinforce_pp", "loss")):
        settings = [f"algo.advantage={advantage}", f"algo.kl.in={placement}"]
        assert "none where nothing scores" in refused(*TAUGHT, teacher, *settings)["algo.advantage"]
    assert "the penalty alone is learned" in refused(*TAUGHT, teacher, FUNCTIONS)["algo.advantage"]
    assert "reward.functions a function" in refused(*TAUGHT)["reward"]
    moving = refused(teacher, "algo.kl.reference_sync.every=1")["algo.kl.reference_sync"]
    assert "whose weights are another model's" in moving
    alone = refused(*without("train", ["reference"]), "algo.kl.coef=0", teacher)
    assert "with the role reference in a group alone" in alone["reference.path"]


def test_several_teachers_are_told_by_a_column_of_the_prompts(tmp_path: Path) -> None:
    paths = {name: str(checkpoint(tmp_path / name, hidden_size=64)) for name in ("math", "code")}
    teachers = f"reference.teachers={json.dumps(paths)}"
    column = "reference.column=kind"
    prompts = ["data.random=null", "data.prompts=configs/debug/data/prompts.jsonl"]
    debug(*TAUGHT, *prompts, teachers, column)
    assert "has an effect with reference.teachers" in refused(*TAUGHT, *prompts, column)["reference.column"]
    assert "the column of a row" in refused(*TAUGHT, *prompts, teachers)["reference.column"]
    both = refused(*TAUGHT, *prompts, teachers, column, f"reference.path={paths['math']}")
    assert "null with reference.teachers" in both["reference.path"]
    rows = ["data.prompts=null", "data.random={count: 8, min_tokens: 2, max_tokens: 4}"]
    assert "needs data.prompts" in refused(*TAUGHT, *rows, teachers, column)["reference.teachers"]
    whole = ["algo.advantage=none", "algo.kl={in: loss, estimator: full, coef: 1.0}"]
    assert "whose update has one teacher" in refused(*TAUGHT, *whole, *prompts, teachers, column)["reference.teachers"]
    missing = refused(*TAUGHT, *prompts, f"reference.teachers={{math: {tmp_path}/nothing}}", column)
    assert "a readable config.json" in missing["reference.teachers.math"]


@given(devices=st.integers(1, 24), tp=st.integers(1, 12), pp=st.integers(1, 12))
def test_a_layout_is_accepted_only_if_whole_replicas_fill_the_group(devices: int, tp: int, pp: int) -> None:
    config = load(DEBUG).model_dump(by_alias=True)
    config["cluster"]["devices_per_node"] = 24
    budget = {"tokens_per_micro_batch": 64}
    roles = {"actor": {"tp": tp, "pp": pp, **budget}, "critic": budget, "reference": budget, "reward": budget}
    config["groups"] = {"train": {"devices": f"0-{devices - 1}", "roles": roles}}
    replicas = [dp for dp in range(1, 25) if tp * pp * dp == devices]
    if replicas:
        layout = build(config).layout("actor")
        assert (layout.tp, layout.pp, layout.dp, layout.world_size) == (tp, pp, replicas[0], devices)
    else:
        with pytest.raises(ConfigError):
            build(config)
