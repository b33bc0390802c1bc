"""The prompts of a step, chosen by the scores of earlier steps.

A curriculum is a function of (history, count, random), with options by keyword, that is called for
each step, again for each further round of `algo.filter`, and again where a step has drawn every
prompt:

    history: `History` of the prompts that may be chosen, P of them.
    count: number of prompts to choose, at most P.
    random: numpy's `Generator`, seeded by the run's seed, the step and the prompts that it has drawn
        so far; the choice may depend on nothing else.

It returns [count] int64, different indices of prompts. The built-in ones estimate how often a
prompt is solved from its last draws: a Beta distribution with their solved and unsolved samples, of
which older ones count less, as the policy changes, and one of each before the first. A prompt
without scores therefore has a rate of 1/2, and 0 of 8 is a rate of 1/10.

Args:
    half_life: steps after which the samples of a draw count half.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.bounds import BelowOne, Fraction, Positive
from megarl.types import Int64Array

Floats = npt.NDArray[np.float64]
Integers = Int64Array

DRAWS_KEPT = 8


@dataclass(frozen=True, kw_only=True)
class History:
    """The last 8 draws of prompts that may be known in a step, [P, 8] each, the newest last.

    Args:
        step: that is sampled.
        steps: step of each draw, from 1 on; 0 where a prompt has fewer draws.
        samples: number of its samples with a score; 0 where all failed.
        scores: their mean score; 0 without samples.
        solved: how much of `data.score_range` they reach, the mean of a number from 0 to 1 each.
    """

    step: int
    steps: Integers
    samples: Integers
    scores: Floats
    solved: Floats


def pools(
    history: History,
    count: int,
    random: np.random.Generator,
    *,
    hard: BelowOne = 0.2,
    easy: BelowOne = 0.8,
    hard_share: Fraction = 0.1,
    easy_share: Fraction = 0.1,
    half_life: Positive = 50.0,
) -> Integers:
    """Shares of the step for hard, medium and easy prompts; of each pool, those that were not drawn for longest.

    A share that is no whole number of prompts is rounded up or down by chance. Where a pool has too
    few prompts, the others fill the step, medium ones first. Source: the difficulty pools of
    prime-rl's buffer.

    Args:
        hard: estimated rate below which a prompt is hard.
        easy: estimated rate above which a prompt is easy.
        hard_share, easy_share: shares of the prompts of a step; the others are medium.
    """
    rates = solve_rates(history, half_life)
    pool = np.where(rates < hard, 1, np.where(rates > easy, 2, 0))
    order = np.lexsort((random.random(len(rates)), history.steps[:, -1]))
    hard_count = int(hard_share * count + random.random())
    easy_count = min(int(easy_share * count + random.random()), count - hard_count)
    chosen: list[Integers] = []
    others: list[Integers] = []
    for number, size in enumerate((count - hard_count - easy_count, hard_count, easy_count)):
        prompts = order[pool[order] == number]
        chosen.append(prompts[:size])
        others.append(prompts[size:])
    return np.concatenate([*chosen, *others])[:count]


def learnability(history: History, count: int, random: np.random.Generator, *, half_life: Positive = 50.0) -> Integers:
    """Draws without replacement, with probabilities in proportion to the expectation of p * (1 - p).

    p is how often the prompt is solved. Source: after Foster et al., "Learning to reason at the
    frontier of learnability" (2025), which measures p by samples of its own.
    """
    solved, unsolved = _counts(history, half_life)
    both = solved + unsolved
    weights = solved * unsolved / (both * (both + 1))
    # The largest of log(w) + Gumbel noise: as if drawn one after the other.
    return _largest(np.log(weights) + random.gumbel(size=len(weights)), count)


def thompson(
    history: History,
    count: int,
    random: np.random.Generator,
    *,
    target: Fraction = 0.5,
    half_life: Positive = 50.0,
) -> Integers:
    """Draws a rate of each prompt from its distribution, and takes those nearest to ``target``.

    Prompts with few draws vary most, and are tried. Source: after MoPPS (Qu et al., "Can prompt
    difficulty be online predicted for accelerating RL finetuning of reasoning models?", 2025), which
    chooses among candidates of a data loader, not among all prompts.

    Args:
        target: rate from which most is learned.
    """
    drawn = random.beta(*_counts(history, half_life))
    return _largest(-np.abs(drawn - target), count)


def solve_rates(history: History, half_life: float) -> Floats:
    """Returns the estimate of how often each prompt is solved, [P]."""
    solved, unsolved = _counts(history, half_life)
    return solved / (solved + unsolved)


def _counts(history: History, half_life: float) -> tuple[Floats, Floats]:
    """Returns solved and unsolved samples of each prompt with one of each before the first, [P]."""
    weights = 0.5 ** ((history.step - history.steps) / half_life) * history.samples
    solved = (weights * history.solved).sum(1)
    return 1 + solved, 1 + weights.sum(1) - solved


def _largest(values: Floats, count: int) -> Integers:
    return np.argsort(-values, kind="stable")[:count]
