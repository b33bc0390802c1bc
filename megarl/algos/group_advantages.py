"""An advantage per sample, from comparing the scores of a prompt's samples.

A group advantage is a function of (samples), which are ``Samples``, with options by keyword, that
returns [N]. Samples without a score are left out of every statistic and get 0, as does the only
scored sample of a group.

    eps: added to the deviation.
    ddof: the deviation's delta degrees of freedom: 1 is the sample deviation, 0 the population's.
    singleton: advantage of the only scored sample of a group: zero, or its raw score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megarl.algos.normalization import on_mask
from megarl.bounds import NotNegative

Singleton = Literal["zero", "raw"]
DDof = Literal[0, 1]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All samples of a step, on all ranks; those of a group need not be neighbors.

    Args:
        scores: [N] float32 or float64, total scores after clipping; in a run float32,
            NaN where not ``scored``.
        groups: [N] int64, the number of each sample's prompt, from 0 on.
        lengths: [N] int64, response tokens.
        finished: [N] bool, True where the model ended the response itself.
        scored: [N] bool, False without a score, for example after a reward function failed.
        components: [N, K] floats, the scores of each reward before weights and clipping; None
            outside of a run.
        weights: K floats, of the rewards in the score.
        greedy_scores: [N], of the greedy response to the same prompt, NaN without a score; None but
            for ``remax``.
    """

    scores: Tensor
    groups: Tensor
    lengths: Tensor
    finished: Tensor
    scored: Tensor
    components: Tensor | None = None
    weights: Sequence[float] = ()
    greedy_scores: Tensor | None = None


def grpo(samples: Samples, *, eps: NotNegative = 1e-6, ddof: DDof = 1, singleton: Singleton = "zero") -> Tensor:
    """(s - mean) / (deviation + eps), within each group; exactly 0 where all scores of a group are equal.

    ``ddof`` 1 is the sample deviation; ``singleton`` raw is verl's. Source: Shao et al.,
    "DeepSeekMath" (2024); eps is 1e-6 in verl, slime and NeMo-RL, 1e-4 in TRL, 1e-5 in AReaL, and
    1e-9 in OpenRLHF (group_norm).
    """

    def standardised(scores: Tensor, _: Tensor) -> Tensor:
        return _centred(scores) / (scores.std(correction=ddof) + eps)

    return _within_groups(samples, standardised, singleton=singleton)


def dr_grpo(samples: Samples, *, singleton: Singleton = "zero") -> Tensor:
    """s - mean, within each group.

    ``reinforce_pp_baseline`` (REINFORCE++-baseline, OpenRLHF's ``reinforce_baseline``) is the same;
    ``algo.normalise.advantages: auto`` then whitens over the tokens of the step. Source: Liu et
    al., "Understanding R1-Zero-like training" (2025), there with the aggregation sequence_sum_norm;
    Hu, "REINFORCE++" (2025).
    """
    return _within_groups(samples, lambda scores, _: _centred(scores), singleton=singleton)


def rloo(samples: Samples, *, singleton: Singleton = "zero") -> Tensor:
    """s - mean of the others, which is (s - mean) * n / (n - 1), within each group of n.

    Source: Ahmadian et al., "Back to basics" (2024); OpenRLHF, verl, TRL.
    """
    return _within_groups(samples, lambda scores, _: _leave_one_out(scores), singleton=singleton)


def masked_rloo(samples: Samples) -> Tensor:
    """s - (sum of the scores of the others that finished) / (n - 1), within each group, where n samples finished.

    A group with less than two finished samples gets 0. The advantages of unfinished samples have no
    meaning: mask them out of the loss. Source: NeMo-Aligner, REINFORCE.
    """

    def over_finished(scores: Tensor, members: Tensor) -> Tensor:
        finished = samples.finished[members]
        if finished.sum() < 2:
            return torch.zeros_like(scores)
        advantages = scores - scores[finished].sum() / (finished.sum() - 1)
        advantages[finished] = _leave_one_out(scores[finished])
        return advantages

    return _within_groups(samples, over_finished)


def rloo_std(samples: Samples, *, eps: NotNegative = 1e-6) -> Tensor:
    """(s - mean of the others) / (deviation of the others + eps), not divided where the others do not differ.

    The deviation is the sample deviation, within each group. Source: NeMo-RL, leave-one-out
    baseline and deviation.
    """

    def over_others(scores: Tensor, _: Tensor) -> Tensor:
        n = len(scores)
        others = scores.expand(n, n)[~torch.eye(n, dtype=torch.bool, device=scores.device)].reshape(n, n - 1)
        differ = others.amax(-1) > others.amin(-1)
        deviation = others.std(-1, correction=min(n - 2, 1))
        return torch.where(differ, _leave_one_out(scores) / (deviation + eps), _leave_one_out(scores))

    return _within_groups(samples, over_others)


def opo(samples: Samples, *, singleton: Singleton = "zero") -> Tensor:
    """s - sum(n * s) / sum(n), within each group, n the response tokens of a sample.

    Source: Hao et al., "On-policy RL with optimal reward baseline" (2025); verl.
    """

    def minus_weighted_mean(scores: Tensor, members: Tensor) -> Tensor:
        centred = _centred(scores)
        lengths = samples.lengths[members].to(scores.dtype)
        return centred - (lengths * centred).sum() / lengths.sum().clamp(min=1)

    return _within_groups(samples, minus_weighted_mean, singleton=singleton)


def pass_at_k(samples: Samples, *, eps: NotNegative = 1e-6) -> Tensor:
    """(best - second best) / (deviation + eps) for the best sample of each group, 0 for the others.

    The deviation is the sample deviation; several equally good best samples get 0. Source: Chen et
    al., "Pass@k training" (2025); verl.
    """

    def lead_of_best(scores: Tensor, _: Tensor) -> Tensor:
        best, second = scores.topk(2).values
        return torch.where(scores == best, (best - second) / (scores.std() + eps), torch.zeros_like(scores))

    return _within_groups(samples, lead_of_best)


def batch_std(samples: Samples, *, eps: NotNegative = 1e-6, ddof: DDof = 1) -> Tensor:
    """(s - mean of the group) / (deviation of all scores of the step + eps).

    ``ddof`` 1 is the sample deviation. Source: TRL, scale_rewards batch, there with eps 1e-4.
    """
    scored = samples.scores[samples.scored].double()
    deviation = scored.std(correction=ddof) if len(scored) > 1 else scored.new_zeros(())
    return _within_groups(samples, lambda scores, _: _centred(scores) / (deviation + eps))


def gpg(samples: Samples) -> Tensor:
    """alpha * (s - mean), within each group; alpha = samples / samples whose s - mean is not 0, over the step.

    Source: Chu et al., "GPG: a simple and strong reinforcement learning baseline" (2025); verl
    counts the scores that are not 0 instead.
    """
    centred = dr_grpo(samples)
    return centred * (samples.scored.sum() / (centred != 0).sum().clamp(min=1))


def remax(samples: Samples) -> Tensor:
    """s - score of the greedy response to the same prompt, 0 where that has no score.

    The greedy response is generated in addition to the samples. Source: Li et al.,
    "ReMax" (2023); verl.
    """
    assert samples.greedy_scores is not None
    comparable = samples.scored & samples.greedy_scores.isfinite()
    return on_mask(samples.scores - samples.greedy_scores, comparable)


def gdpo(samples: Samples, *, eps: NotNegative = 1e-6) -> Tensor:
    """sum over the rewards k of weight[k] * (s[k] - mean) / (deviation + eps), within each group.

    It is the weighted sum of grpo of each reward, with the sample deviation. Source: GDPO (Liu et
    al., 2026); verl.
    """
    assert samples.components is not None
    advantages = [
        weight * grpo(replace(samples, scores=scores), eps=eps)
        for weight, scores in zip(samples.weights, samples.components.unbind(-1), strict=True)
    ]
    return torch.stack(advantages).sum(0)


def none(samples: Samples) -> Tensor:
    """No advantages: 0 for every sample.

    For a policy loss that reads none, such as sft, or a penalty that is learned alone, as that of a
    teacher. Source: reward-ranked fine-tuning (RAFT, Dong et al., 2023).
    """
    return torch.zeros_like(samples.scores)


def _within_groups(
    samples: Samples, rule: Callable[[Tensor, Tensor], Tensor], *, singleton: Singleton = "zero"
) -> Tensor:
    """Calls ``rule`` with the scores, [n] float64, and the indices of the samples of each group of at least two."""
    members = samples.scored.nonzero().flatten()
    members = members[samples.groups[members].argsort(stable=True)]
    advantages = torch.zeros_like(samples.scores)
    starts = samples.groups[members].diff().nonzero().flatten() + 1
    for group in torch.tensor_split(members, starts.cpu()):
        scores = samples.scores[group]
        if len(group) > 1:
            advantages[group] = rule(scores.double(), group).to(advantages.dtype)
        elif len(group) == 1 and singleton == "raw":
            advantages[group] = scores
    return advantages


def _centred(scores: Tensor) -> Tensor:
    """s - mean; exactly 0 where all are equal, despite the rounding of the mean."""
    return torch.zeros_like(scores) if scores.min() == scores.max() else scores - scores.mean()


def _leave_one_out(scores: Tensor) -> Tensor:
    """s - mean of the others."""
    return _centred(scores) * (len(scores) / (len(scores) - 1))
