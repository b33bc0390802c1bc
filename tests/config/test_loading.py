"""Files, inheritance, overrides, and saving to a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import ConfigError, Problem, load, parse_devices
from megarl.config.inheritance import merged
from megarl.config.schema import STAGES
from megarl.stages.ppo.config import PPOConfig
from megarl.types import Layout
from tests.config.debug import ACTOR, DEBUG, GRPO, REPOSITORY, by_field, debug, problems, refused, without


def write(path: Path, text: str) -> Path:
    path.write_text(dedent(text))
    return path


def test_later_files_override_earlier_ones_and_the_file_itself_overrides_all(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "algo: {kl: {coef: 0.1, target: 0.1, horizon: 1}, ppo_epochs: 5}")
    write(tmp_path / "b.yaml", "algo: {kl: {target: 0.2, horizon: 2}}")
    own = write(tmp_path / "own.yaml", f"defaults: [{DEBUG}, a.yaml, b.yaml]\nalgo: {{kl: {{horizon: 3}}}}")
    config = load(own, ["algo.ppo_epochs=7"])
    assert isinstance(config, PPOConfig)
    kl = config.algo.kl
    assert (kl.coef, kl.target, kl.horizon, config.algo.ppo_epochs) == (0.1, 0.2, 3, 7)


def test_names_of_inherited_files_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(tmp_path / "below" / "base.yaml", f"defaults: [{DEBUG}]\nrun: {{seed: 5}}")
    write(tmp_path / "below" / "middle.yaml", "defaults: [base.yaml]")
    assert load(write(tmp_path / "top.yaml", "defaults: [below/middle.yaml]")).run.seed == 5


def test_diamond_inheritance_is_allowed(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", f"defaults: [{DEBUG}]\nrun: {{seed: 5}}")
    write(tmp_path / "left.yaml", "defaults: [base.yaml]\nrun: {steps: 9}")
    write(tmp_path / "right.yaml", "defaults: [base.yaml]")
    config = load(write(tmp_path / "own.yaml", "defaults: [left.yaml, right.yaml]"))
    assert isinstance(config, PPOConfig)
    assert (config.run.seed, config.run.steps) == (5, 3)  # right comes later, with everything that it inherits


def test_cyclic_inheritance_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "defaults: [b.yaml]")
    write(tmp_path / "b.yaml", "defaults: [a.yaml]")
    with pytest.raises(ConfigError, match=r"must not inherit itself \(a\.yaml -> b\.yaml -> a\.yaml\)"):
        load(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("run: [", "must be YAML"),
        ("run: {seed: 1}\nrun: {seed: 2}", "must be YAML"),
        ("- run", "keys and values"),
        ("5", "keys and values"),
        ("defaults: base.yaml", "list of file names"),
        (f"defaults: [{DEBUG}]\nrun: [1]", "must be a list, or hold keys, in all files alike"),
        ("defaults: [nowhere.yaml]", "must be readable"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        load(write(tmp_path / "bad.yaml", text))
    assert "bad.yaml" in str(caught.value)


def test_every_unusable_file_is_reported_at_once(tmp_path: Path) -> None:
    write(tmp_path / "broken.yaml", "a: [")
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / "own.yaml", "defaults: [nowhere.yaml, broken.yaml]"))
    assert [Path(problem.value).name for problem in caught.value.problems] == ["nowhere.yaml", "broken.yaml"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("cluster.nodes=2", "name the YAML file of the run first"),
        ("steps", "correct the path (it is looked up in {here})"),
        ("lr=1/steps.yaml", "correct the path (it is looked up in {here})"),
        ("mine", "name a YAML file in it: ppo.yaml, sft.yaml"),
        ("empty", "name a YAML file in it: it has none"),
        ("nowhere/base.yaml", "correct the path"),
        ("bass.yaml", "did you mean base.yaml?"),
        ("mine/ppo.yml", "did you mean mine/ppo.yaml?"),
    ],
)
def test_an_argument_that_is_neither_file_nor_setting_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, said: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "empty").mkdir()
    for file in ("base.yaml", "mine/ppo.yaml", "mine/sft.yaml"):
        write(tmp_path / file, "a: 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"No such file|Is a directory") as caught:
        load(word)
    (problem,) = caught.value.problems
    assert said.format(here=tmp_path) in problem.fix


def test_a_path_that_does_not_exist_suggests_the_nearest_one_or_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "rows.jsonl", "{}")
    for field, path, fix in (
        ("data.prompts", "rows.jsonl", f"correct the path (it is looked up in {tmp_path})"),
        ("data.prompts", "data/row.jsonl", "did you mean data/rows.jsonl?"),
        ("rollout.replay", "/nowhere", "correct the path, or"),
        ("model.path", "model", f"(it is looked up in {tmp_path})"),
        ("model.path", "Qwen/Qwen2.5-0.5B", "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen/Qwen2.5-0.5B"),
        ("model.path", "data/rows", "hf download OWNER/NAME --local-dir data/rows"),
    ):
        found = problems("model.random=null", "data.random=null", f"{field}={path}")
        assert fix in found[field].fix


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("run.steps=0", "raise it to 1 or more; it is: Steps of the run"),
        ("run.steps=1.5", "write a whole number; it is: Steps of the run"),
        ("actor.optimizer.warmup=1", "lower it below 1; it is: Fraction of"),
        ("algo.kl.in=rewards", "did you mean reward?; it is: Where the penalty acts"),
        ("resharding.verify=x", "write true or false; it is: "),
        ("algo.policy_loss=my_losses.plain", "write my_losses:plain"),
        ("algo.policy_loss.clip=1", "lower it below 1; it is: How far the ratio may fall below 1"),
        ("algo.kl.koef=1", "did you mean algo.kl.coef?"),
        ("groups.train.roles.actr.tp=1", "did you mean groups.train.roles.actor?"),
        ("defaults=[grpo]", "write defaults: [grpo] into a file, and name it"),
        ("defaults.x=grpo", "write defaults: [grpo] into a file, and name it"),
        ("groups=[1]", "correct the value"),
        ("cluster=3", "write keys with values: {key: value}; it is: The devices"),
        ("model=3", "write keys with values: {key: value}; it is: The model, such as model: {path: models/mine}."),
        ("rolout.tp=1", "did you mean rollout?"),
        ("run.qqqqqq=1", "remove it; known here: dir, seed, steps, epochs, max_skipped_steps, time_limit"),
        ("reward.functions=[{name: length, wieght: 2}]", "did you mean reward.functions.0.weight?"),
        ("evaluation={prompts: {path: p/q, splits: train}}", "did you mean evaluation.prompts.split?"),
    ],
)
def test_a_fix_says_what_to_write(override: str, fix: str) -> None:
    (problem,) = problems(override).values()
    assert problem.fix.startswith(fix)


def test_override_values_are_read_as_yaml() -> None:
    config = debug(
        "actor.optimizer.lr=2e-6",
        "actor.optimizer.betas=[0.8,0.9]",
        "algo.value_loss.clip=null",
        "rollout.devices=0,2-3",
        "run.dir=runs/lr=1",
    )
    assert config.run.dir == "runs/lr=1"
    assert config.actor.optimizer.lr == 2e-6
    assert config.actor.optimizer.betas == (0.8, 0.9)
    assert config.algo.value_loss.options["clip"] is None
    assert config.rollout.devices == "0,2-3"
    assert config.rollout.engines == 3


def test_interpolation_refers_to_other_fields() -> None:
    assert debug("data.random.seed=${run.seed}", "run.seed=11").data.random.seed == 11  # pyright: ignore[reportOptionalMemberAccess]
    assert "not found" in refused("run.dir=${nowhere}")["run.dir"]


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("r.x=2", "r must not have keys: it is the reference ${a}"),
        ("a=[1]", "a must be keys with values, as {b: [1]}, not a list"),
        ("a.b.0=2", "b must be a list, as [1], not keys with values"),
    ],
)
def test_keys_lists_and_references_do_not_replace_each_other(tmp_path: Path, override: str, rule: str) -> None:
    raw, (problem,) = merged(write(tmp_path / "own.yaml", "a: {b: [1]}\nr: ${a}"), [override])
    assert raw == {"a": {"b": [1]}, "r": {"b": [1]}}
    assert rule in problem.rule


def test_an_override_finds_a_key_that_is_a_number(tmp_path: Path) -> None:
    own = write(tmp_path / "own.yaml", "args: {bias: {5: 1.0, 7: 2.0}}")
    assert merged(own, ["args.bias.5=3.0"]) == ({"args": {"bias": {5: 3.0, 7: 2.0}}}, [])


def test_malformed_overrides_are_reported_with_other_problems() -> None:
    rules = refused("steps", ".=3", "[=3", "a=[", "run=[]", "algo.policy_loss.clip=-1", "rollout.tp=3")
    assert rules["override"].count("key.path=value") == 3
    assert "fits its place" in rules["run"]
    assert "parsing" in rules["a"]
    assert "greater than 0" in rules["algo.policy_loss.clip"]
    assert "must divide" in rules["rollout.tp"]


def test_entries_without_keys_are_reported_with_their_purpose() -> None:
    assert refused("reward.functions=length")["reward.functions"] == "should be a list"
    entries = ["reward.functions=[length]", "algo.correction.reject=[null]", "groups.more=3"]
    found = problems(*entries, "actor.optimizer.betas=[1]")
    for field, value in {
        "reward.functions.0": "length",
        "algo.correction.reject.0": "null",
        "groups.more": "3",
    }.items():
        assert (found[field].value, found[field].rule) == (value, "should be keys with values")
    assert found["reward.functions.0"].fix == "write it as {name: length}"
    assert "{key: value}; it is: Tokens or responses outside" in found["algo.correction.reject.0"].fix
    assert "running means" in found["actor.optimizer.betas.1"].fix


def test_suggestions_for_values_are_values_and_for_keys_are_keys() -> None:
    found = problems("rollout={tp: 1}", "lr=1e-5", "data.prompts=a/b", stage="sft")
    assert found["rollout"].fix.startswith("remove it")  # cluster.time_limits.rollout is a number
    assert found["lr"].fix == "did you mean actor.optimizer.lr?"
    assert found["data.prompts"].fix.startswith("remove it")


def test_fixes_are_one_line_and_values_are_yaml() -> None:
    bad = problems("algo.correction.reject=[{statistic: k7, upper: 2}]")["algo.correction.reject.0.statistic"]
    assert bad.value == "k7"
    assert "over a response. k1 is log p(engines)" in bad.fix  # two lines in the schema
    assert "\n" not in bad.fix
    for text, value in {"true": "true", ".inf": "inf", "[.inf]": "[.inf]", "!!binary /w==": r"b'\xff'"}.items():
        assert problems(f"cluster.nodes={text}")["cluster.nodes"].value == value
    stops = problems("rollout.stop_token_ids=[3, 96]")["rollout.stop_token_ids"]
    assert (stops.value, stops.fix) == ("[96]", "remove them")
    assert problems(*GRPO, "algo={advantage: gdpo, scores: {clip: 3}}")["algo.scores.clip"].value == "[-3.0, 3.0]"


def test_field_problems_and_rule_problems_are_reported_together() -> None:
    rules = refused(
        "run.stepz=3",  # unknown
        "run.steps=0",  # out of range
        "actor.optimizer.lr=fast",  # of another type
        f"{ACTOR}.tq=2",  # unknown, in a section whose rules are still checked
        f"{ACTOR}.tp=3",  # between fields
        "rollout.devices=9",  # between sections
    )
    assert set(rules) >= {"run.stepz", "run.steps", "actor.optimizer.lr", f"{ACTOR}.tq", ACTOR, "rollout.devices"}


def test_the_text_has_field_value_rule_and_fix() -> None:
    with pytest.raises(ConfigError) as caught:
        debug("algo.mini_batches=3")
    assert str(caught.value) == dedent(f"""\
        {DEBUG}: 1 problem
          algo.mini_batches = 3
            rule: must divide data.prompts_per_step * data.samples_per_prompt = 16
            fix:  choose a divisor of 16""")


@pytest.mark.parametrize(
    ("stage", "sections"),
    [("sft", ["data", "actor"]), ("reward_model", ["data", "reward"]), ("ppo", ["rollout", "data", "actor"])],
)
def test_required_sections_are_named(tmp_path: Path, stage: str, sections: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / "empty.yaml", f"stage: {stage}\nrun: {{dir: here, steps: 1}}"))
    missing = {problem.field: problem for problem in caught.value.problems if problem.rule == "required"}
    assert missing.keys() == {"model", *sections}
    examples = [problem.fix.split(", such as ")[1].removesuffix(".") for problem in missing.values()]
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / "full.yaml", "\n".join([f"stage: {stage}\nrun: {{dir: here, steps: 1}}", *examples])))
    rules = by_field(caught.value)
    assert set(rules) <= {"model.path", "data.prompts", "data.train", "reward", "critic", "algo.advantage"}
    assert "config.json" in rules["model.path"]


@pytest.mark.parametrize("text", ["run: {steps: 1}", "stage: rlhf", "stage: 3", "stage: [sft]"])
def test_the_stage_is_checked_first(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / "own.yaml", text))
    assert by_field(caught.value) == {"stage": f"one of {', '.join(STAGES)}"}


def test_nothing_is_coerced() -> None:
    rules = refused("run.steps='3'", "resharding.verify=1", "run.seed=1.5", "run.dir=3", "cluster.nodes=true")
    assert set(rules) == {"run.steps", "resharding.verify", "run.seed", "run.dir", "cluster.nodes"}


def test_numbers_are_checked_against_their_bounds() -> None:
    beyond = {
        "rollout.temperature": "0.009",
        "evaluation.temperature": "2.01",
        "rollout.top_p": "1.01",
        "rollout.top_k": "0",
        "rollout.min_new_tokens": "-1",
        "data.samples_per_prompt": "0",
        "algo.ppo_epochs": "0",
        "algo.entropy_coef": "-0.1",
        "actor.optimizer.lr": "0",
        "actor.optimizer.warmup": "1",
        "actor.ema.decay": "1.01",
        "run.seed": "-1",
        "cluster.object_store_mib": "79",
        "resharding.bucket_mib": "0",
    }
    rules = refused(*(f"{field}={value}" for field, value in beyond.items()))
    assert rules.keys() == beyond.keys()
    assert all(rule.startswith("should be ") for rule in rules.values())


@pytest.mark.parametrize(
    ("text", "devices"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0,1,4-5", (0, 1, 4, 5)), ("7, 2-3", (7, 2, 3)), ("10-10", (10,))],
)
def test_device_lists_are_expanded_in_order(text: str, devices: tuple[int, ...]) -> None:
    assert parse_devices(text) == devices


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-", "-1", "0,,1", "0-3,2", "1,1", "0:3", "1.5"])
def test_invalid_device_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|twice"):
        parse_devices(text)


def test_null_removes_a_role_and_a_group() -> None:
    config = debug(
        *without("train", ["critic"]),
        "groups.critic.devices=4-5",
        "groups.critic.roles.critic.pp=2",
        "cluster.devices_per_node=6",
    )
    assert config.group_of("critic") == "critic"
    assert config.layout("critic") == Layout(pp=2)
    assert config.device_list("critic") == (4, 5)
    with pytest.raises(KeyError):
        debug(*without("train", ["reference"]), "algo.kl.coef=0").group_of("reference")


def test_the_debug_run_accepts_a_group_per_role() -> None:
    config = debug(
        "groups.train=null",
        "groups.actor={devices: 0-3, roles: {actor: {tp: 2, pp: 2}}}",
        "groups.critic={devices: 4-5, roles: {critic: {pp: 2}}}",
        "groups.reference={devices: 6-7, roles: {reference: {tp: 2}}}",
        "groups.reward={devices: 8, roles: {reward: {tp: 1}}}",
        "rollout.devices=9",
        "cluster.devices_per_node=10",
    )
    assert [config.group_of(role) for role in ("actor", "critic", "reference", "reward")] == list(config.groups)


@pytest.mark.process
def test_loading_imports_nothing_heavy() -> None:
    code = f"""
import sys
from megarl.config import load
load({str(DEBUG)!r})
print(sorted({{"torch", "ray", "vllm", "transformers", "megatron"}} & set(sys.modules)))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert out.stdout.strip() == "[]"


def paths(tree: Mapping[str, Any], above: str = "") -> list[str]:
    here = [f"{above}{key}" for key in tree]
    return here + [path for key in tree if isinstance(tree[key], dict) for path in paths(tree[key], f"{above}{key}.")]


VALUES = [
    "0", "-1", "1.5", "1e400", ".nan", ".inf", "null", "true", "x", "'3'", "0-1", "[]", "[1, 2]", "[", "{}", "{a: 1}",
    "{1: 2}", "${run.seed}", "${x", "2024-01-01", "9" * 30, "!!python/object:os.system x", "!!binary /w==", "&a [*a]",
]  # fmt: skip
KEYS = paths(debug().model_dump(by_alias=True))


@given(
    st.sampled_from(["ppo", "raft", "eval"]),
    st.lists(
        st.one_of(
            st.builds("{}={}".format, st.sampled_from(KEYS), st.sampled_from(VALUES)),
            st.builds("{}={}".format, st.text("ab.[]$={}'\"", max_size=6), st.sampled_from(VALUES)),
            st.text(max_size=12),
        ),
        max_size=3,
    ),
)
@settings(deadline=None)
def test_any_input_is_accepted_or_refused_with_a_message(stage: str, overrides: list[str]) -> None:
    found: tuple[Problem, ...] = ()
    try:
        load(DEBUG.with_stem(stage), overrides)
    except ConfigError as error:
        found = error.problems
    assert all(problem.field and problem.rule and problem.fix for problem in found)
