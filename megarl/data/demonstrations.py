"""Demonstrations: prompts with the response to learn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, eq=False)
class Demonstration:
    """One prompt and its response, tokenised.

    Args:
        key: unique in its data set, the same in every run.
        prompt_ids: P ids, int32.
        response_ids: R ids, int32, the end token included.
    """

    key: str
    prompt_ids: npt.NDArray[np.int32]
    response_ids: npt.NDArray[np.int32]
