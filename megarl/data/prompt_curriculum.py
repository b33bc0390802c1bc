"""Prompts that are drawn by the scores of earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megarl.algos.curriculum import KEPT, History, solve_rates
from megarl.data.stream import stable_hash
from megarl.errors import RunError

EASY: Final = 0.8
HARD: Final = 0.2
"""Rates that bound the pools in the metrics."""


class Draw(NamedTuple):
    """The scored samples of a prompt in a step: the step, their mean score, and their number."""

    step: int
    score: float
    samples: int


class Curriculum:
    """Draws the prompts of each step from the scores that are known whenever it is sampled.

    Step t may be sampled as soon as step t - 1 - S is trained on, S being the staleness, so it reads
    the scores of steps up to that one. The draws then depend on neither time nor the number of
    engines, and a resumed run repeats them.

    Args:
        keys: of all prompts.
        choose: function of ``algos.curriculum``, with its options.
        name: its name, for messages.
        scale: scores of a wrong and of a right response, for the metrics.
    """

    def __init__(
        self,
        keys: Iterable[str],
        choose: Callable[..., npt.NDArray[np.int64]],
        *,
        name: str,
        seed: int,
        staleness: int,
        scale: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self._keys = sorted(keys)
        self._choose = choose
        self._name = name
        self._seed = seed
        self._staleness = staleness
        self._scale = scale
        self._draws: dict[str, list[Draw]] = {}

    def next(self, step: int, count: int, drawn: Sequence[str]) -> list[str]:
        """Returns the next prompts of a step that has drawn some; all are drawn before one is drawn again."""
        taken: list[str] = []
        while len(taken) < count:
            before = [*drawn, *taken]
            rounds = len(before) // len(self._keys)
            used = set(before[rounds * len(self._keys) :])
            keys = [key for key in self._keys if key not in used]
            random = np.random.default_rng(stable_hash(self._seed, step, len(before), "curriculum"))
            wanted = min(count - len(taken), len(keys))
            chosen = np.asarray(self._choose(self._history(step, keys), wanted, random))
            if chosen.shape != (wanted,) or len(set(chosen.tolist()) & set(range(len(keys)))) != wanted:
                rule = f"must return {wanted} different indices from 0 to {len(keys) - 1}"
                raise RunError(f"data.curriculum: {self._name} {rule}; it returned {chosen!r}")
            taken += [keys[index] for index in chosen.tolist()]
        return taken

    def note(self, step: int, scores: Mapping[str, Sequence[float]]) -> None:
        """Takes the scores of a step's samples, by prompt; prompts without one have not been drawn."""
        for key, known in scores.items():
            if known:
                draws = self._draws.setdefault(key, [])
                draws.append(Draw(step, float(np.mean(known)), len(known)))
                del draws[: -KEPT - self._staleness - 1]  # later steps may be known that must not be read yet

    def metrics(self, step: int, prompts: Sequence[str]) -> dict[str, float]:
        """Returns the shares of the pools in all prompts, as known for a step, and the rate of its prompts."""
        history = self._history(step, self._keys)
        rates = solve_rates(history, *self._scale, KEPT)
        seen = history.samples[:, -1] > 0
        rows = np.searchsorted(self._keys, list(prompts))
        return {
            "curriculum/unseen": float((~seen).mean()),
            "curriculum/hard": float((seen & (rates < HARD)).mean()),
            "curriculum/medium": float((seen & (rates >= HARD) & (rates <= EASY)).mean()),
            "curriculum/easy": float((seen & (rates > EASY)).mean()),
            "curriculum/rate": float(rates[rows].mean()),
        }

    def state(self) -> dict[str, Any]:
        """Returns the draws by prompt, as JSON."""
        return {key: [list(draw) for draw in draws] for key, draws in sorted(self._draws.items())}

    def load(self, state: Mapping[str, Any]) -> None:
        self._draws = {key: [Draw(*draw) for draw in draws] for key, draws in state.items()}

    def _history(self, step: int, keys: Sequence[str]) -> History:
        """Returns what is known of some prompts when a step is sampled."""
        last = step - 1 - self._staleness
        shape = (len(keys), KEPT)
        history = History(
            scores=np.full(shape, np.nan), samples=np.zeros(shape, np.int64), steps=np.zeros(shape, np.int64)
        )
        for row, key in enumerate(keys):
            known = [draw for draw in self._draws.get(key, ()) if draw.step <= last][-KEPT:]
            for column, draw in enumerate(known, KEPT - len(known)):
                history.steps[row, column] = draw.step
                history.scores[row, column] = draw.score
                history.samples[row, column] = draw.samples
        return history
