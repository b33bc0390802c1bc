"""Custom functions in a configuration: valid ones are accepted, others are reported before anything starts."""

from __future__ import annotations

import pytest

from megarl.algos.registry import KINDS
from megarl.config.schema import CustomFunction, stage_classes
from megarl.config.schema.schema_walk import choices, sections
from megarl.preflight.user_functions import check_own_functions
from tests.config.debug import GRPO, debug

HERE = "tests.own_functions"


def wrong(*overrides: str) -> dict[str, str]:
    """The problems of the functions in the debug run with overrides, by field."""
    return {problem.field: f"{problem.rule} | {problem.fix}" for problem in check_own_functions(debug(*overrides))}


def test_valid_functions_are_accepted() -> None:
    overrides = [
        f"algo.advantage={{name: '{HERE}:last_reward', level: token}}",
        f"algo.normalise.advantages={HERE}:halved",
        f"algo.policy_loss={{name: '{HERE}:quadratic', args: {{power: 2}}}}",
        f"algo.aggregation={HERE}:plain_mean",
        f"algo.kl.estimator={HERE}:of_two",
        f"algo.filter={{name: '{HERE}:easy', args: {{least: 0.5}}}}",
    ]
    assert wrong(*overrides) == {}
    assert wrong(*GRPO, f"algo.advantage={{name: '{HERE}:above_the_median', args: {{scale: 2}}}}") == {}


def test_missing_functions_are_reported_together() -> None:
    found = wrong("algo.policy_loss=nowhere_at_all:f", f"algo.value_loss={HERE}:cubic")
    assert set(found) == {"algo.policy_loss.name", "algo.value_loss.name"}
    assert "No module named" in found["algo.policy_loss.name"]
    assert "has no 'cubic'" in found["algo.value_loss.name"]


def test_a_way_to_move_weights_is_loaded() -> None:
    assert wrong("resharding.transport=examples.directory_transfer:DirectoryTransfer") == {}
    for name in ("nowhere_at_all:Way", "examples.directory_transfer:Nothing", "examples.directory_transfer:Path"):
        assert list(wrong(f"resharding.transport={name}")) == ["resharding.transport"]


@pytest.mark.parametrize(
    ("overrides", "field", "text"),
    [
        ([f"algo.policy_loss={HERE}:quadratic"], "algo.policy_loss.args", "'power'"),
        (
            [f"algo.policy_loss={{name: '{HERE}:quadratic', args: {{power: 2, clip: 1}}}}"],
            "algo.policy_loss.args",
            "'clip'",
        ),
        ([f"algo.value_loss={HERE}:plain_mean"], "algo.value_loss.args", "(values, old_values, returns)"),
        ([f"algo.aggregation={HERE}:of_two"], "algo.aggregation.args", "of_two"),
        (
            [
                "algo.kl={in: loss, importance: true}",
                f"algo.kl.estimator={HERE}:of_two",
            ],
            "algo.kl.estimator.args",
            "(logprobs, ref_logprobs, importance)",
        ),
        (
            [f"algo.advantage={{name: '{HERE}:above_the_median', level: token}}"],
            "algo.advantage.args",
            "(rewards, values, response_mask)",
        ),
    ],
)
def test_functions_with_a_wrong_signature_are_reported(overrides: list[str], field: str, text: str) -> None:
    found = wrong(*overrides)
    assert set(found) == {field}
    assert text in found[field]


def test_every_choice_with_custom_functions_has_a_signature() -> None:
    """By field; a choice without CustomFunction has only built-in functions."""
    tables = {path: below for schema in stage_classes().values() for path, below in sections(schema) if choices(below)}
    own = {
        path
        for path, below in tables.items()
        if any(issubclass(member, CustomFunction) for member in below.table.values())
    }
    assert own <= {kind.field for kind in KINDS}
    assert {kind.field for kind in KINDS} <= set(tables)
