"""KL controllers: by hand, and across a checkpoint."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algos.kl import KLController


def test_a_fixed_coefficient_stays_that_of_the_configuration() -> None:
    controller = KLController(0.1, target=None, horizon=1.0)
    controller.update(50.0, 64)
    controller.load(json.loads(json.dumps(KLController(0.5, target=None, horizon=1.0).state())))
    assert controller.coef == 0.1


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.6, 1 + 0.1 * 0.5), (5.7, 1 - 0.05 * 0.5), (60.0, 1 + 0.2 * 0.5), (-3.0, 1 - 0.2 * 0.5), (6.0, 1.0)],
)
def test_the_error_is_relative_and_bounded(kl: float, factor: float) -> None:
    controller = KLController(0.3, target=6.0, horizon=100.0)
    controller.update(kl, samples=50)
    assert controller.coef == pytest.approx(0.3 * factor)


@given(st.lists(st.tuples(st.floats(-10, 100), st.integers(1, 64)), max_size=8), st.integers(0, 8))
def test_a_controller_resumes_exactly(updates: list[tuple[float, int]], cut: int) -> None:
    whole, first, second = (KLController(0.3, target=6.0, horizon=100.0) for _ in range(3))
    for update in updates:
        whole.update(*update)
    for update in updates[:cut]:
        first.update(*update)
    second.load(json.loads(json.dumps(first.state())))
    for update in updates[cut:]:
        second.update(*update)
    assert second.coef == whole.coef


def test_a_nan_kl_leaves_the_coefficient() -> None:
    controller = KLController(0.15, target=6.0, horizon=10000.0)
    controller.update(float("nan"), 512)
    assert controller.coef == 0.15
    controller.update(float("inf"), 512)  # far beyond the target: the largest move
    assert controller.coef == pytest.approx(0.15 * (1 + 0.2 * 512 / 10000))
