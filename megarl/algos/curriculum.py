"""The prompts of a step, chosen by the scores of earlier steps.

A curriculum is a function of (history, count, random), with options by keyword, that is called for
each step, and again for each further round of `algo.filter`:

    history: `History` of the prompts that may be chosen, P of them.
    count: number of prompts to choose, at most P.
    random: numpy's `Generator`, seeded by the run's seed, the step and the round; the choice may
        depend on nothing else.

It returns [count] different indices of prompts. The built-in ones estimate how often a prompt is
solved: scores from `lowest` to `highest` are mapped to 0 to 1, and the samples of its last draws are
added to a uniform prior, so that a prompt without scores has a rate of 1/2. Of `history`, at most
the last `recent` draws count, as the policy changes.

Args:
    lowest: score of a response that is wrong.
    highest: score of a response that is right.
    recent: draws of a prompt that count, its newest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.bounds import Draws, Fraction

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

KEPT = 8
"""Draws of a prompt in a history."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The last draws of prompts, the newest last, [P, 8] each.

    Args:
        scores: mean score of a draw's samples, NaN where a prompt has fewer draws.
        samples: number of these samples, 0 where a prompt has fewer draws.
        steps: step of the draw, from 1 on, 0 where a prompt has fewer draws.
    """

    scores: Floats
    samples: Integers
    steps: Integers


def pools(
    history: History,
    count: int,
    random: np.random.Generator,
    *,
    hard: Fraction = 0.2,
    easy: Fraction = 0.8,
    hard_share: Fraction = 0.1,
    easy_share: Fraction = 0.1,
    lowest: float = 0.0,
    highest: float = 1.0,
    recent: Draws = 4,
) -> Integers:
    """Shares of the step for hard, medium and easy prompts; of each pool, those that were not drawn for longest.

    Where a pool has too few prompts, the others fill the step, medium ones first. Source: the
    difficulty pools of prime-rl's buffer.

    Args:
        hard: rate below which a prompt is hard.
        easy: rate above which a prompt is easy.
        hard_share, easy_share: shares of the prompts of a step; the others are medium.
    """
    rates = _rates(*_counts(history, lowest, highest, recent))
    pool = np.where(rates < hard, 1, np.where(rates > easy, 2, 0))
    order = np.lexsort((random.random(len(rates)), history.steps[:, -1]))
    hard_count = round(hard_share * count)
    easy_count = min(round(easy_share * count), count - hard_count)
    chosen: list[Integers] = []
    others: list[Integers] = []
    for number, size in enumerate((count - hard_count - easy_count, hard_count, easy_count)):
        prompts = order[pool[order] == number]
        chosen.append(prompts[:size])
        others.append(prompts[size:])
    return np.concatenate([*chosen, *others])[:count]


def learnability(
    history: History,
    count: int,
    random: np.random.Generator,
    *,
    lowest: float = 0.0,
    highest: float = 1.0,
    recent: Draws = 4,
) -> Integers:
    """Draws without replacement, with probabilities in proportion to the expectation of p * (1 - p).

    p is how often the prompt is solved, Beta-distributed. Source: Foster and Foerster, "Learning to
    reason at the frontier of learnability" (2025).
    """
    right, wrong = _counts(history, lowest, highest, recent)
    both = right + wrong
    weights = right * wrong / (both * (both + 1))
    # The largest of log(w) + Gumbel noise: as if drawn one after the other.
    return _largest(np.log(weights) + random.gumbel(size=len(weights)), count)


def thompson(
    history: History,
    count: int,
    random: np.random.Generator,
    *,
    target: Fraction = 0.5,
    lowest: float = 0.0,
    highest: float = 1.0,
    recent: Draws = 4,
) -> Integers:
    """Draws a rate of each prompt from its Beta posterior, and takes those nearest to ``target``.

    Prompts with few draws vary most, and are tried. Source: MoPPS (Qu et al., "Can prompt difficulty
    be online predicted for accelerating RL finetuning of reasoning models?", 2025).

    Args:
        target: rate from which most is learned.
    """
    drawn = random.beta(*_counts(history, lowest, highest, recent))
    return _largest(-np.abs(drawn - target), count)


def solve_rates(history: History, lowest: float, highest: float, recent: int) -> Floats:
    """Returns how often each prompt is solved, [P]."""
    return _rates(*_counts(history, lowest, highest, recent))


def _rates(right: Floats, wrong: Floats) -> Floats:
    return right / (right + wrong)


def _counts(history: History, lowest: float, highest: float, recent: int) -> tuple[Floats, Floats]:
    """Returns right and wrong answers of each prompt with one of each before the first, [P]."""
    samples = history.samples[:, -recent:]
    solved = ((history.scores[:, -recent:] - lowest) / (highest - lowest)).clip(0.0, 1.0)
    right = np.where(samples > 0, solved * samples, 0.0).sum(1)
    return 1 + right, 1 + samples.sum(1) - right


def _largest(values: Floats, count: int) -> Integers:
    return np.argsort(-values, kind="stable")[:count]
