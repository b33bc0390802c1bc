"""Sweeps: values as they are written, and every combination of them."""

from __future__ import annotations

import itertools
import re

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.launch.sweep_cells import read_sweeps
from tests.unit_profile import fewer

SCALARS = st.one_of(
    st.integers(-5, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(st.sampled_from(["name", "clip"]), SCALARS))


def written(value: object) -> str:
    """A value as somebody would write it on a command line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).removesuffix("...\n").strip()
    return text if not isinstance(value, str) else "'" + value.replace("'", "''") + "'"


@settings(max_examples=fewer(30))
@given(st.lists(st.lists(VALUES, min_size=1, max_size=3), min_size=1, max_size=3))
def test_every_combination_is_a_cell(axes: list[list[object]]) -> None:
    sweeps = [f"section.key{n}={','.join(map(written, values))}" for n, values in enumerate(axes)]
    cells, problems = read_sweeps(sweeps)
    assert not problems
    read = [[yaml.safe_load(text.partition("=")[2]) for text in cell.overrides] for cell in cells]
    expected = [list(values) for values in itertools.product(*axes)]
    assert repr(read) == repr(expected)
    assert [cell.index for cell in cells] == list(range(len(expected)))


@settings(max_examples=fewer(30))
@given(st.lists(VALUES, min_size=1, max_size=4))
def test_cell_names_are_plain_and_unique(values: list[object]) -> None:
    cells, _ = read_sweeps([f"actor.optimizer.lr={','.join(map(written, values))}"])
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(values)
    assert all(re.fullmatch(r"cell-\d+[A-Za-z0-9._+-]*", name) and len(name) <= 100 for name in names)


def test_values_keep_their_commas() -> None:
    cells, _ = read_sweeps(["algo.policy_loss={name: ppo, clip: 0.1},gspo", "actor.optimizer.betas=[0.9, 0.95]"])
    assert [cell.overrides for cell in cells] == [
        ("algo.policy_loss={name: ppo, clip: 0.1}", "actor.optimizer.betas=[0.9, 0.95]"),
        ("algo.policy_loss=gspo", "actor.optimizer.betas=[0.9, 0.95]"),
    ]
    assert [cell.name for cell in cells] == [
        "cell-0-policy_loss-name-ppo-clip-0.1-betas-0.9-0.95",
        "cell-1-policy_loss-gspo-betas-0.9-0.95",
    ]


def test_malformed_value_lists_are_refused() -> None:
    for text in ("run.seed", "run.seed=", "=1,2", "a=1]", "a=[1", "a=1,,2", "a={b: 1", "a='x"):
        cells, problems = read_sweeps([text])
        assert (cells, [problem.field for problem in problems]) == ([], ["--sweep"]), text
