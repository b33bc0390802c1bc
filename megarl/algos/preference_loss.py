"""Losses of the reward model, per pair of responses or per choice among several.

A function of your own is one of (chosen, rejected), with options by keyword:

    chosen: [P] float32, the scores of the preferred responses; carries the gradient.
    rejected: [P] float32, the scores of the others; carries the gradient.

The loss is the mean of its values over all pairs of the step.

Metrics of all: ``accuracy``, 1 where the preferred response scores higher than every other; of
pairs also ``margin``, chosen - rejected, and the scores, ``chosen`` and ``rejected``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from megarl.algos.normalization import on_mask
from megarl.algos.policy_loss import LossTerms
from megarl.bounds import NotNegative


def pairwise(
    chosen: Tensor,
    rejected: Tensor,
    margins: Tensor | None = None,
    *,
    margin: bool = False,
    kind: Literal["logsigmoid", "logexp"] = "logsigmoid",
    centering: NotNegative = 0.0,
) -> LossTerms:
    """The negative log-likelihood of the preferences under the Bradley-Terry model.

    logsigmoid: l = -log sigmoid(chosen - rejected - margin) + centering * (chosen + rejected)^2;
    logexp: the same as log(1 + exp(rejected - chosen)), without a margin. Both are
    computed without overflow.
    Source: Bradley and Terry (1952); the margin is that of Llama 2 (Touvron et al., 2023), the term
    that keeps the scores around 0 that of Eisenstein et al., "Helping or herding?" (2023); logexp
    as in ColossalChat and OpenRLHF.

    Args:
        margins: [P], of the rows; needed with ``margin``.
        margin: subtract the rows' margins from the difference.
        kind: -log sigmoid(difference), or log(1 + exp(-difference)), the same without margin.
        centering: weight of the squared sum of a pair's scores, which keeps the scores around 0.
    """
    assert (margins is not None) == margin
    difference = chosen - rejected
    values = -functional.logsigmoid(difference if margins is None or kind == "logexp" else difference - margins)
    if centering:
        values = values + centering * (chosen + rejected).square()
    return LossTerms(values=values, metrics=_metrics(chosen, rejected))


def best_of_n(scores: Tensor, best: Tensor) -> LossTerms:
    """Cross-entropy of the best of N responses to a prompt under the softmax of their scores.

    l = logsumexp(scores) - scores[best]. Source: Ziegler et al., "Fine-tuning language models from
    human preferences" (2019), with N = 4.

    Args:
        scores: [P, N]; carries the gradient.
        best: [P] int64, the column of the best.
    """
    values = torch.logsumexp(scores, -1) - scores.gather(-1, best[:, None]).squeeze(-1)
    hits = (scores.argmax(-1) == best).to(scores.dtype)
    return LossTerms(values=values, metrics={"accuracy": hits})


def span(chosen: Tensor, rejected: Tensor, chosen_ids: Tensor, rejected_ids: Tensor, pad: int) -> LossTerms:
    """The Bradley-Terry loss at every token where the responses differ, averaged per pair.

    l = mean over the span of -log sigmoid(chosen[t] - rejected[t]), of the scores after each token,
    [P, T]. The scores of the metrics are those of the last tokens.
    Source: DeepSpeed-Chat's reward model.

    Args:
        chosen_ids, rejected_ids: [P, T] int64, right-padded; a row ends before its first ``pad``.
            The span goes from the first difference up to the end of the longer response; that of
            two equal rows is the last column alone.
    """
    width = chosen_ids.shape[1]
    columns = torch.arange(width, device=chosen_ids.device)

    def first(found: Tensor, otherwise: int) -> Tensor:
        return torch.where(found, columns, otherwise).amin(-1)

    chosen_end = first(chosen_ids == pad, width)
    rejected_end = first(rejected_ids == pad, width)
    start = first(chosen_ids != rejected_ids, width)
    end = torch.maximum(chosen_end, rejected_end)
    equal = start == width
    start = torch.where(equal, width - 1, start)
    end = torch.where(equal, width, end)
    mask = (columns >= start[:, None]) & (columns < end[:, None])
    counted = on_mask(chosen - rejected, mask)
    values = -(functional.logsigmoid(counted) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    chosen_last = chosen.gather(-1, (chosen_end - 1).clamp(min=0)[:, None])
    rejected_last = rejected.gather(-1, (rejected_end - 1).clamp(min=0)[:, None])
    return LossTerms(values=values, metrics=_metrics(chosen_last.squeeze(-1), rejected_last.squeeze(-1)))


def _metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    margin = (chosen - rejected).detach()
    return {
        "accuracy": (margin > 0).to(margin.dtype),
        "margin": margin,
        "chosen": chosen.detach(),
        "rejected": rejected.detach(),
    }
