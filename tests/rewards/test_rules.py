"""The built-in functions against cases by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.functions import contains, exact_match, extracted_match, last_number, regex, soft_overlong
from tests.rewards.completions import completion


@pytest.mark.parametrize(
    ("response", "reference", "ignore_case", "score"),
    [
        ("abc", "abc", False, 1),
        (" abc\n", "abc ", False, 1),
        ("Abc", "abc", False, 0),
        ("Abc", "abc", True, 1),
        ("abcd", "abc", False, 0),
        ("42", 42, False, 1),
        ("", "abc", False, 0),
    ],
)
def test_exact_match(response: str, reference: object, ignore_case: bool, score: float) -> None:
    assert exact_match(completion(response, key=reference), field="key", ignore_case=ignore_case) == score


@pytest.mark.parametrize(
    ("response", "ignore_case", "score"), [("so: Abc.", False, 1), ("abc", False, 0), ("abc", True, 1)]
)
def test_contains(response: str, ignore_case: bool, score: float) -> None:
    assert contains(completion(response, answer="Abc"), ignore_case=ignore_case) == score


@pytest.mark.parametrize(
    ("pattern", "response", "whole", "score"),
    [
        (r"\d+", "I say 42", False, 1),
        (r"\d+", "I say 42", True, 0),
        (r"\d+", "42", True, 1),
        (r"<think>.*</think>\w+", "<think>one\ntwo</think>three", True, 1),
        (r"<think>.*</think>\w+", "<think>one\ntwo", True, 0),
    ],
)
def test_regex(pattern: str, response: str, whole: bool, score: float) -> None:
    assert regex(completion(response), pattern=pattern, whole=whole) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [("<a>7</a> or <a> 8 </a>", 1), ("<a>8</a> or <a>7</a>", 0), ("8", 0), ("<a>8\n</a>", 1)],
)
def test_the_last_extract_is_the_answer(response: str, score: float) -> None:
    assert extracted_match(completion(response, answer="8"), pattern="<a>(.*?)</a>") == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("3 + 4 = 7, so 1,234.50 in all.", 1),
        ("#### 1234.5", 1),
        ("$1,234.5", 1),
        ("1234.5 of 2", 0),
        ("-1234.5", 0),
        ("2469-1234.5", 1),  # a difference, not a negative number
        ("12345", 0),
        ("none", 0),
        ("", 0),
    ],
)
def test_last_number(response: str, score: float) -> None:
    assert last_number(completion(response, answer="12 * 3 = 36, ...\n#### 1,234.5")) == score


def test_a_comma_separated_list_is_not_one_number() -> None:
    assert last_number(completion("1,2,3", answer=3)) == 1
    assert last_number(completion("1,200,300", answer=1_200_300)) == 1


@pytest.mark.parametrize(("response", "score"), [("0.33", 1), ("0.31", 1), ("0.36", 0), ("1/3", 0)])
def test_last_number_within_a_tolerance(response: str, score: float) -> None:
    assert last_number(completion(response, answer="0.33"), tolerance=0.02) == score


@given(st.integers(-(10**12), 10**12), st.integers(0, 999))
def test_every_number_matches_however_it_is_written(whole: int, thousandths: int) -> None:
    plain, grouped = f"{whole}.{thousandths:03}", f"{whole:,}.{thousandths:03}"
    assert last_number(completion(f"it is {grouped}.", answer=plain)) == 1
    assert last_number(completion(f"it is {plain}", answer=f"{whole + 1}.{thousandths:03}")) == 0


def test_a_field_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="the field 'answer' has no number: 'none'"):
        last_number(completion("3", answer="none"))


def test_a_missing_field_error_names_the_present_fields() -> None:
    with pytest.raises(ValueError, match="the prompt has no field 'answer'; it has: key, level"):
        exact_match(completion("3", key="3", level=1))


@pytest.mark.parametrize(
    ("tokens", "score"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (150, -1)]
)
def test_soft_overlong(tokens: int, score: float) -> None:
    given = completion(tokens=tokens)
    assert soft_overlong(given, max_tokens=100, buffer_tokens=20) == pytest.approx(score)
    assert soft_overlong(given, max_tokens=100, buffer_tokens=20, penalty=3.0) == pytest.approx(3 * score)
    talk = replace(
        given, response_ids=(*given.response_ids, 7, 8, 9), loss_mask=(*[True] * tokens, False, False, False)
    )
    assert soft_overlong(talk, max_tokens=100, buffer_tokens=20) == pytest.approx(score)
    falling = -3.5 if tokens == 150 else score  # 70 tokens into a buffer of 20
    assert soft_overlong(given, max_tokens=100, buffer_tokens=20, capped=False) == pytest.approx(falling)
