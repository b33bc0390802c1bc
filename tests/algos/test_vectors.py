"""Every case of vectors.json that megarl.algos can run, values and gradients, in float64 and float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.algos.vector_adapter import UnsupportedError, run

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
CASES = {case["id"]: case for case in VECTORS["cases"]}
DTYPES = {"float64": torch.float64, "float32": torch.float32}

SUPPORTED = [
    *("kl-01", "kl-02", "kl-06", "kl-07", "trunc-03", "rew-01", "rew-02", "rew-06", "rew-07"),
    *("wh-04", "wh-10", "wh-13", "gae-01", "gae-02", "gae-04", "gae-08", "agg-01", "agg-04"),
    *("lay-01", "lay-02", "lay-04", "lay-06", "lay-07", "pg-01", "pg-02", "pg-06", "pg-11", "pg-12"),
    *("vf-01", "vf-02", "vf-06", "met-01", "met-02", "rm-05", "rm-11", "klc-01", "klc-02"),
    *("grp-01", "grp-12", "grp-14", "tot-01"),
]
NOT_OURS = {"clipfrac_lower", "kl_seq_mean_mean", "openai"}
"""Outputs that we do not have: of dual clipping, a metric, and the explained variance of values after an update."""


def compare(name: str, got: Any, expected: Any, mask: Any, dtype: str) -> None:
    ours, theirs = np.array(got, dtype=np.float64), np.array(expected, dtype=np.float64)
    if mask is not None and ours.shape == np.shape(
        mask
    ):  # what stands off the mask is each implementation's own affair
        ours, theirs = ours * mask, theirs * mask
    np.testing.assert_allclose(ours, theirs, **VECTORS["tolerance"][dtype], err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case_id", SUPPORTED)
def test_vector(case_id: str, dtype: str) -> None:
    case = CASES[case_id]
    outputs = run(case, DTYPES[dtype])
    missing = case["expected"].keys() - outputs.keys() - NOT_OURS
    assert not missing, "an expected output is not computed"
    for name in case["expected"].keys() & outputs.keys():
        got, expected = outputs[name], case["expected"][name]
        if case["fn"] == "whiten_sharded" and name == "whitened":
            for ours, theirs, mask in zip(got, expected, case["args"]["masks"], strict=True):
                compare(name, ours, theirs, mask, dtype)
        else:
            compare(name, got, expected, case["args"].get("mask"), dtype)


def test_the_list_of_supported_cases_is_complete() -> None:
    def supported(case: dict[str, Any]) -> bool:
        try:
            run(case)
        except UnsupportedError:
            return False
        return True

    assert [case_id for case_id, case in CASES.items() if supported(case)] == sorted(SUPPORTED, key=list(CASES).index)
