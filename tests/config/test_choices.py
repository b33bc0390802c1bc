"""Choices by name: how they are written, merged and refused, and that their options equal the functions'."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

import pytest
from pydantic import BaseModel

from megarl.algos import signatures
from megarl.algos.registry import KINDS, Kind
from megarl.algos.signatures import REQUIRED, signature_of
from megarl.config import load, save
from megarl.config.inheritance import FREE
from megarl.config.schema import STAGES, stage_class, stage_classes
from megarl.config.schema.schema_walk import choices, fields, section, sections, type_of
from megarl.stages.ppo.config import PPOConfig
from tests.config.debug import DEBUG, debug, problems, refused, without


def over(tmp_path: Path, *texts: str, overrides: tuple[str, ...] = ()) -> PPOConfig:
    """The debug run with further files, each overriding the earlier ones."""
    names = [str(DEBUG)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(text)
        names.append(f"{number}.yaml")
    (tmp_path / "top.yaml").write_text(f"defaults: [{', '.join(names)}]")
    config = load(tmp_path / "top.yaml", overrides)
    assert isinstance(config, PPOConfig)
    return config


def test_a_name_alone_and_a_name_with_options() -> None:
    plain, rich = debug("algo.value_loss=huber"), debug("algo.value_loss={name: huber, delta: 3}")
    assert plain.algo.value_loss.options == {"clip": 0.2, "scale": 0.5, "delta": 10.0}
    assert rich.algo.value_loss.options == {"clip": 0.2, "scale": 0.5, "delta": 3.0}


def test_options_without_a_name_apply_to_the_default() -> None:
    assert debug("algo.normalise.advantages.name=auto").algo.normalise.advantages.name == "auto"
    assert debug("algo.value_loss.clip=0.7").algo.value_loss.options == {"clip": 0.7, "scale": 0.5}


def test_a_custom_function_takes_arguments() -> None:
    own = debug("algo.policy_loss={name: my.losses:quadratic, args: {power: 3}}").algo.policy_loss
    assert (own.name, own.options) == ("my.losses:quadratic", {"power": 3})


def test_options_on_top_of_a_name_alone_keep_the_name(tmp_path: Path) -> None:
    files = ("algo: {aggregation: token_sum, policy_loss: cispo}", "algo: {policy_loss: {clip_high: 3.0}}")
    loss = over(tmp_path, *files, overrides=("algo.policy_loss.clip=0.5",)).algo.policy_loss
    assert (loss.name, loss.options) == ("cispo", {"clip": 0.5, "clip_high": 3.0})


def test_another_name_drops_the_options_of_the_previous_one(tmp_path: Path) -> None:
    below = "algo: {policy_loss: {name: ppo, clip: 0.5, dual_clip: 3.0}}"
    for above in ("algo: {policy_loss: sapo}", "algo: {policy_loss: {name: sapo}}"):
        assert over(tmp_path, below, above).algo.policy_loss.options == {"tau_pos": 1.0, "tau_neg": 1.05}
    again = over(tmp_path, below, "algo: {policy_loss: {name: sapo}}", "algo: {policy_loss: {name: ppo, clip: 0.4}}")
    assert again.algo.policy_loss.options["dual_clip"] is None
    assert over(tmp_path, below, overrides=("algo.policy_loss.name=cispo",)).algo.policy_loss.options["clip"] == 0.2
    same = over(tmp_path, below, "algo: {policy_loss: {name: ppo, clip: 0.1}}")
    assert (same.algo.policy_loss.options["clip"], same.algo.policy_loss.options["dual_clip"]) == (0.1, 3.0)


def test_a_key_called_name_in_user_data_is_not_a_choice(tmp_path: Path) -> None:
    below = "algo: {policy_loss: {name: 'my.losses:f', args: {name: one, power: 3}}}"
    loss = over(tmp_path, below, overrides=("algo.policy_loss.args.name=other",)).algo.policy_loss
    assert loss.options == {"name": "other", "power": 3}


def test_file_merging_recognises_user_mappings() -> None:
    found: set[str] = set()
    for schema in stage_classes().values():
        for _, below in [("", schema), *sections(schema)]:
            for owner in choices(below).values() or (below,):
                for key, info in fields(owner).items():
                    if get_origin(type_of(info)) is Mapping and section(type_of(info)) is None:
                        found.add(key)
    assert found == FREE


def test_a_source_given_by_path_takes_further_keys() -> None:
    source = debug("data.random=null", "data.prompts=some/set", "data.prompts.split=train").data.prompts
    assert source is not None
    assert (source.path, source.split) == ("some/set", "train")


def test_choices_round_trip_through_a_file(tmp_path: Path) -> None:
    algo = ["algo.policy_loss=cispo", "algo.scores.clip=3", "algo.kl={coef: 0}", "algo.filter=nonzero_std"]
    config = debug(*algo, *without("train", ["reference"]), "algo.value_loss.clip=null", "algo.aggregation=a.b:c")
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config
    assert config.algo.scores.clip == (-3.0, 3.0)


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("run=fast", ["run = fast", "should be keys with values"]),
        ("algo.advantage=grop", ["algo.advantage = grop", "rule: one of gae, vapo, rein", "did you mean grpo?"]),
        ("algo.policy_loss=z", ["package.module:function\n"]),
        ("algo.advantage=Dr-GRPO", ["did you mean dr_grpo?"]),
        ("algo.policy_loss={clip: 0.1, name: xyz}", ["algo.policy_loss = xyz"]),
        ("algo.value_loss=3", ["{name: ..., option: ...}"]),
        ("algo.correction.weights.upper=5", ["algo.correction.weights = {upper: 5}"]),
        ("algo.filter.tol=0.1", ["algo.filter = ", "{name: ..., option: ...}"]),
        ("algo.advantage={name: grpo, lam: 1}", ["unknown option of grpo; its options are eps, ddof, singleton\n"]),
        ("algo.advantage={name: grpo, lam: 1}", ["advantage.lam = 1", "remove it, or choose gae, which has it"]),
        ("algo.policy_loss.klip=1", ["did you mean algo.policy_loss.clip?"]),
        ("algo.value_loss={x_y_z: 1}", ["algo.value_loss.x_y_z = 1", "remove it; known here: clip, scale"]),
        ("algo.gamma=0.9", ["algo.gamma = 0.9", "did you mean algo.advantage.gamma?"]),
        ("algo.clip_high=0.3", ["did you mean algo.policy_loss.clip_high?"]),
        ("algo.xyzzy=1", ["remove it; known here: advantage"]),
    ],
)
def test_what_is_no_choice_is_refused_with_what_is_known(override: str, texts: list[str]) -> None:
    found = map(str, problems(override).values())
    assert any(all(text in problem for text in texts) for problem in found)


@pytest.mark.parametrize(
    ("override", "field", "rule"),
    [
        ("algo.advantage={name: gae, lam: 2}", "algo.advantage.lam", "should be less than or equal to 1"),
        ("algo.policy_loss.dual_clip=1", "algo.policy_loss.dual_clip", "should be greater than 1"),
        ("algo.scores.clip=[1, 0]", "algo.scores.clip", "should rise: a number above 0, or [lower, upper]"),
        ("algo.scores.missing_end={name: subtract}", "algo.scores.missing_end.penalty", "required"),
        ("algo.kl.estimator={name: k3, limit: often}", "algo.kl.estimator.limit", "should be a valid number"),
        ("algo.aggregation=sequence_sum_norm", "algo.aggregation.tokens", "required"),
        ("algo.correction.reject=[{statistic: k9, upper: 2}]", "algo.correction.reject.0.statistic", "'token_k1'"),
        ("algo.value_loss={name: 'a:b:c'}", "algo.value_loss.name", "a function, written as package.module:function"),
    ],
)
def test_wrong_option_values_are_reported_by_option_path(override: str, field: str, rule: str) -> None:
    assert rule in refused(override)[field]


# ---- options are those of the functions

BY_HAND = {"auto", "none", "mask", "uniform"}
"""Names without a function: what the estimator's source does, nothing, no weight, and epochs."""


def tables() -> dict[str, Mapping[str, type[BaseModel]]]:
    """The choices of every field that has some, by path."""
    return {
        path: choices(below)
        for schema in stage_classes().values()
        for path, below in sections(schema)
        if choices(below)
    }


def test_every_choice_field_lists_the_registry() -> None:
    names = {path: {name for name in table if ":" not in name} - BY_HAND for path, table in tables().items()}
    registered: dict[str, set[str]] = {}
    for kind in KINDS:
        registered.setdefault(kind.field, set()).update(kind.functions.keys() - BY_HAND)
    assert names == registered


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.title)
def test_signatures_read_from_the_source_equal_the_functions(kind: Kind[Any]) -> None:
    for name in kind.functions:
        parameters = inspect.signature(kind.function(name)).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        for given in (*kind.keywords, *kind.presets.get(name, ()), "dtype"):
            own.pop(given, None)
        read = kind.signature(name).options
        assert {key: option.default for key, option in read.items()} == {
            key: REQUIRED if default is inspect.Parameter.empty else default for key, default in own.items()
        }
        choice = tables()[kind.field][name]
        assert [key for key in choice.model_fields if key != "name"] == list(own), name


def test_options_without_a_docstring_take_the_modules() -> None:
    def meaning(function: str, option: str) -> str:
        return signature_of("policy_loss", function).options[option].meaning

    assert meaning("ppo", "clip_high") == meaning("cispo", "clip_high")
    assert meaning("ppo", "clip_high").endswith("its upper bound is 1 + clip_high (DAPO: 0.28); null takes clip.")
    assert meaning("gmpo", "clip") == "The log-ratio is clipped from below at -clip."


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("a: NotThere = 1", "line 1: NotThere is neither a type"),
        ("a: str = 'b'", "line 1: str is neither a type"),
        ("a=1", "the option a of loss needs an annotation"),
        ("b: float = 1", "the option b of loss needs an entry in the Args"),
    ],
)
def test_an_option_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, text: str
) -> None:
    monkeypatch.setattr(signatures, "__file__", str(tmp_path / "signatures.py"))
    module = tmp_path.name  # another one in each case, as a source is read once
    function = f'def loss(*, {option}):\n    """A loss.\n\n    Args:\n        a: a number.\n    """\n'
    (tmp_path / f"{module}.py").write_text(function)
    with pytest.raises(TypeError, match=text):
        signature_of(module, "loss")
    with pytest.raises(TypeError, match=f"names nothing, which megarl/algos/{module}.py does not define"):
        signature_of(module, "nothing")


# ---- fields


def described(schema: type[BaseModel]) -> Iterator[str]:
    """The fields of a schema by path; a choice is one, whichever options it has, and a section that is null by default
    is one. Every field has a description."""
    for key, info in fields(schema).items():
        assert info.description, f"{schema.__name__}.{key} has no description"
        below = None if choices(type_of(info)) or info.default is None else section(type_of(info))
        yield from [key] if below is None else (f"{key}.{path}" for path in described(below))


@pytest.mark.parametrize("stage", STAGES)
def test_fields_are_few_and_documented(stage: str) -> None:
    assert len(list(described(stage_class(stage)))) <= 180
    for path, below in sections(stage_class(stage)):
        for schema in choices(below).values() or (below,):
            bare = [key for key, info in fields(schema).items() if not info.description and key != "name"]
            assert bare == [], f"{path}: {schema.__name__}"
