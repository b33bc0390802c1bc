"""Runs the cases of vectors.json with the functions of megarl.algos.

vectors.json is language-neutral: numbers from an independent numpy implementation, compared with the published systems
that it names. A case is {id, fn, args, expected}; ``run`` returns what ours computes of ``expected`` by the same names.
The adapters rename and reshape: they do no arithmetic. An argument that an adapter does not name is a TypeError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.algos import vectors_of_experience, vectors_of_losses, vectors_of_scores

RUNNERS = {
    name: function
    for module in (vectors_of_scores, vectors_of_experience, vectors_of_losses)
    for name, function in vars(module).items()
    if getattr(function, "__annotations__", {}).get("return") == "Outputs"
}
"""The functions that return outputs run the cases of their names."""
BOOLS = {"mask", "has_token", "truncated", "discard"}
INTEGERS = {"labels", "responses", "best", "chosen_ids", "rejected_ids", "versions", "cu_short", "lengths"}
LISTS = {
    *("eos_ids", "clip", "ratio_clamp", "groups", "weights", "updates", "shards", "masks", "batches", "layout"),
    *("options", "thresholds", "policy_kls", "index", "permutations", "group_rewards"),
}
"""Arguments that stay lists; all others are tensors of the default dtype."""


class UnsupportedError(Exception):
    """The case is of a convention that megarl.algos does not have: rows padded to one width, or seeds by rank."""


def run(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What ours computes of a case, as lists and floats."""
    if case["fn"] not in RUNNERS or case["args"].get("placement") == "after_last":
        raise UnsupportedError(case["fn"])
    torch.set_default_dtype(dtype)
    try:
        outputs = RUNNERS[case["fn"]](**{name: converted(name, value) for name, value in case["args"].items()})
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in outputs.items()}


def converted(name: str, value: Any) -> Any:
    if not isinstance(value, list) or name in LISTS:
        return value
    if name in BOOLS:
        return torch.tensor(value).bool()
    return torch.tensor(value, dtype=torch.int64 if name in INTEGERS else torch.get_default_dtype())
