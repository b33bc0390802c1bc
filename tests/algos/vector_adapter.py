"""Runs the cases of vectors.json with the functions of megarl.algos.

vectors.json is language-neutral: numbers from an independent numpy implementation, compared with the published systems
that it names. A case is {id, fn, args, expected}; ``run`` returns what ours computes of ``expected`` by the same names.
The adapters rename and reshape: they do no arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.algos.adapters import experience, optimisation, scores, updates
from tests.algos.adapters.common import Args, Runner, UnsupportedError

RUNNERS: dict[str, Runner] = {**scores.RUNNERS, **experience.RUNNERS, **updates.RUNNERS, **optimisation.RUNNERS}


def run(case: Args, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What ours computes of a case, as lists and floats.

    Raises:
        UnsupportedError: there is no such function, or not with these arguments.
    """
    if case["fn"] not in RUNNERS:
        raise UnsupportedError(case["fn"])
    torch.set_default_dtype(dtype)
    try:
        outputs = RUNNERS[case["fn"]](dict(case["args"]))
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in outputs.items()}
