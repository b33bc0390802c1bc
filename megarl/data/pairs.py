"""Preference pairs: two responses to a prompt, of which one is better."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One prompt and two responses to it, tokenised.

    Args:
        key: unique in its data set, the same in every run.
        prompt_ids: P ids, int32.
        chosen_ids, rejected_ids: ids of the better and of the worse response, int32, the end token included.
    """

    key: str
    prompt_ids: npt.NDArray[np.int32]
    chosen_ids: npt.NDArray[np.int32]
    rejected_ids: npt.NDArray[np.int32]
