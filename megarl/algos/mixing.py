"""Weights of models that are averages, and shares of losses that are sums of two."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def ptx_shares(*, coef: float, mode: Literal["add", "convex", "deepspeed"] = "add") -> tuple[float, float]:
    """What the policy loss and the loss of mixed-in text are multiplied by, before they are added up.

    add: L + c * L_ptx; convex: (1 - c) * L + c * L_ptx; deepspeed: (L + c * L_ptx) / 2. L_ptx is the mean negative
    log-likelihood per token of the text in an optimizer step, with a denominator of its own. Source: Ouyang et al.,
    "Training language models to follow instructions with human feedback" (2022), with c = 27.8; ColossalChat (convex);
    DeepSpeed-Chat, which divides each half of a doubled accumulation window by the whole.

    Args:
        coef: c.
        mode: see above.

    Returns:
        The shares of the policy and of the text.
    """
    match mode:
        case "add":
            return 1.0, coef
        case "convex":
            return 1.0 - coef, coef
        case "deepspeed":
            return 0.5, coef / 2


def ema(average: Tensor, current: Tensor, *, decay: float) -> Tensor:
    """decay * average + (1 - decay) * current: the next value of an exponential moving average of weights.

    Of the actor it is taken once per optimizer step, beginning with a copy; with decay = 1 - w it is the soft
    synchronisation of the reference, w * actor + (1 - w) * reference. Source: OpenRLHF and DeepSpeed-Chat (.992); TRL's
    ``ref_model_mixup_alpha``.

    Args:
        average: float32 or float64: in bfloat16 the steps of a slow average are lost in rounding.
        current: same shape, any float type.
        decay: weight of the average.

    Raises:
        TypeError: ``average`` has fewer bits than float32.
    """
    if average.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"an average of {average.dtype} does not move: keep it in float32")
    return torch.lerp(current.to(average.dtype), average, decay)
