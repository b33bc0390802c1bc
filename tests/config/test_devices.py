"""Device lists: parsing and refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import parse_devices


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


@given(st.lists(st.integers(0, 40), min_size=1, unique=True))
def test_any_device_list_round_trips(devices: list[int]) -> None:
    assert parse_devices(",".join(map(str, devices))) == tuple(devices)
