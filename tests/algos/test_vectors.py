"""Every case of vectors.json, values and gradients, in float64 and float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.algos.vector_adapter import RUNNERS, run

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
PADDED = {"position_ids", "left_pad", "rank_seeds", "rew-04"}
"""Conventions of systems that pad rows to one width, or that seed ranks."""
CASES = {case["id"]: case for case in VECTORS["cases"] if not {case["fn"], case["id"]} & PADDED}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def compare(name: str, got: Any, expected: Any, dtype: str) -> None:
    """Numbers, lists of any depth with rows of any lengths, and mappings of these."""
    if isinstance(expected, dict):
        assert got.keys() >= expected.keys(), f"{name}: {expected.keys() - got.keys()} not computed"
        for key, value in expected.items():
            compare(f"{name}.{key}", got[key], value, dtype)
    elif isinstance(expected, list):
        assert len(got) == len(expected), f"{name}: {len(got)} instead of {len(expected)}"
        for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            compare(f"{name}[{index}]", ours, theirs, dtype)
    elif expected is None:
        assert got is None, f"{name}: {got} instead of nothing"
    else:
        np.testing.assert_allclose(float(got), float(expected), **VECTORS["tolerance"][dtype], err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case_id", CASES)
def test_vector(case_id: str, dtype: str) -> None:
    case = CASES[case_id]
    compare(case_id, run(case, DTYPES[dtype]), case["expected"], dtype)


def test_all_cases_are_here() -> None:
    assert {case["fn"] for case in CASES.values()} == RUNNERS.keys()
    assert len(CASES) == 127


def test_a_wrong_number_fails_the_comparison() -> None:
    case = CASES["gae-01"]
    got = run(case)
    got["advantages"][0][0] += 1e-6
    with pytest.raises(AssertionError, match=r"gae-01\.advantages\[0\]\[0\]"):
        compare("gae-01", got, case["expected"], "float64")
