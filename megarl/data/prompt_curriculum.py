"""Prompts that are drawn by the scores of earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megarl.algos.curriculum import DRAWS_KEPT, History, solve_rates
from megarl.algos.registry import CURRICULA, bound
from megarl.config import RolloutTrainingConfig
from megarl.config.schema import CustomFunction
from megarl.data.stream import stable_hash
from megarl.errors import RunError
from megarl.types import AnyArray, BoolArray, Int64Array, Prompt

_COLUMNS = ("steps", "samples", "scores", "solved")


class Curriculum:
    """Draws the prompts of each step from the scores that are known whenever it is sampled.

    Step t may be sampled as soon as step t - 1 - S is trained on, S being the staleness, so it reads
    the scores of steps up to that one, and leaves out the prompts of the steps between, as long as
    there are others. In the mode `exact` the draws then depend on neither time nor the number of
    engines, and a resumed run repeats them.

    Args:
        keys: of all prompts.
        choose: function of ``algos.curriculum``, with its options.
        name: its name, for messages.
        score_range: scores of a wrong and of a right response.
        half_life, pools: of the metrics: see ``algos.curriculum``, and the rates that bound the pools.
    """

    def __init__(
        self,
        keys: Iterable[str],
        choose: Callable[..., Any],
        *,
        name: str,
        seed: int,
        staleness: int,
        score_range: tuple[float, float] = (0.0, 1.0),
        half_life: float = 50.0,
        pools: tuple[float, float] = (0.2, 0.8),
    ) -> None:
        self._staleness = staleness
        self._keys = sorted(keys)
        self._rows = {key: row for row, key in enumerate(self._keys)}
        self._choose = choose
        self._name = name
        self._seed = seed
        self._range = score_range
        self._half_life = half_life
        self._pools = pools
        # Later steps than a step may read are among them.
        shape = (len(self._keys), DRAWS_KEPT + staleness)
        self._first_rounds: dict[int, list[str]] = {}
        self._columns: dict[str, AnyArray] = {
            "steps": np.zeros(shape, np.int64),
            "samples": np.zeros(shape, np.int64),
            "scores": np.zeros(shape),
            "solved": np.zeros(shape),
        }

    def next(self, step: int, count: int, drawn: Sequence[str]) -> list[str]:
        """Returns the next prompts of a step that has drawn some; all are drawn before one is drawn again."""
        taken: list[str] = []
        history = self._history(step)
        waiting: list[str] = []
        for earlier in range(step - self._staleness, step):  # further rounds are drawn at any time
            waiting += self._first_rounds.get(earlier, ())
        while len(taken) < count:
            before = [*drawn, *taken]
            whole = len(before) // len(self._keys) * len(self._keys)
            free = self._without(np.ones(len(self._keys), np.bool_), before[whole:])
            wanted = min(count - len(taken), int(free.sum()))
            others = self._without(free, waiting)
            if others.sum() >= wanted:
                free = others
            random = np.random.default_rng(stable_hash(self._seed, step, len(before), "curriculum"))
            for row in self._chosen(history, np.flatnonzero(free), wanted, random):
                taken.append(self._keys[row])
        if not drawn:
            self._first_rounds[step] = taken
        return taken

    def _without(self, rows: BoolArray, keys: Sequence[str]) -> BoolArray:
        left = rows.copy()
        for key in keys:
            left[self._rows[key]] = False
        return left

    def _chosen(self, history: History, rows: Int64Array, count: int, random: np.random.Generator) -> list[int]:
        """Returns some of the rows, as the function chooses; raises RunError if it does not."""
        columns = {name: getattr(history, name)[rows] for name in _COLUMNS}
        try:
            chosen = np.asarray(self._choose(History(step=history.step, **columns), count, random))
        except Exception as error:
            raise RunError(f"data.curriculum: {self._name} failed: {type(error).__name__}: {error}") from error
        is_right = chosen.shape == (count,) and np.issubdtype(chosen.dtype, np.integer)
        if not is_right or len(np.unique(chosen)) < count or chosen.min() < 0 or chosen.max() >= len(rows):
            rule = f"must return {count} different integers from 0 to {len(rows) - 1}"
            raise RunError(f"data.curriculum: {self._name} {rule}; it returned {chosen!r}")
        return rows[chosen].tolist()

    def note(self, step: int, scores: Mapping[str, Sequence[float]]) -> None:
        """Takes the known scores of a step's samples, by prompt; none where all samples of a prompt failed."""
        self._first_rounds.pop(step - self._staleness, None)
        lowest, highest = self._range
        for key, known in scores.items():
            row = self._rows[key]
            solved = [min(max((score - lowest) / (highest - lowest), 0.0), 1.0) for score in known]
            number = max(len(known), 1)
            values = (step, len(known), sum(known) / number, sum(solved) / number)
            for name, value in zip(_COLUMNS, values, strict=True):
                column = self._columns[name]
                column[row, :-1] = column[row, 1:]
                column[row, -1] = value

    def metrics(self, step: int, prompts: Sequence[str]) -> dict[str, float]:
        """Returns the shares of the pools in all prompts, as known for a step, and the rate of its prompts."""
        history = self._history(step)
        rates = solve_rates(history, self._half_life)
        hard, easy = self._pools
        known = history.samples.sum(1) > 0
        is_hard = known & (rates < hard)
        is_easy = known & (rates > easy)
        pools = {
            "unknown": ~known,
            "hard": is_hard,
            "medium": known & ~is_hard & ~is_easy,
            "easy": is_easy,
        }
        metrics: dict[str, float] = {}
        for name, members in pools.items():
            metrics[f"curriculum/{name}"] = float(members.mean())
        rows: list[int] = []
        for key in prompts:
            rows.append(self._rows[key])
        metrics["curriculum/rate"] = float(rates[rows].mean())
        return metrics

    def state(self) -> dict[str, Any]:
        """Returns the draws of the prompts that have any, and the first rounds of the last steps, as JSON."""
        rows = np.flatnonzero(self._columns["steps"][:, -1])
        state: dict[str, Any] = {
            "prompts": [self._keys[row] for row in rows],
            "first_rounds": {},
        }
        for name, column in self._columns.items():
            state[name] = column[rows].tolist()
        for step, prompts in sorted(self._first_rounds.items()):
            state["first_rounds"][str(step)] = prompts
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads `state()`, also of another staleness."""
        self._first_rounds = {}
        for step, prompts in state["first_rounds"].items():
            self._first_rounds[int(step)] = list(prompts)
        for name, column in self._columns.items():
            width = column.shape[1]
            for key, values in zip(state["prompts"], state[name], strict=True):
                row = self._rows[key]
                newest = values[-width:]
                column[row, width - len(newest) :] = newest

    def _history(self, step: int) -> History:
        """Returns what is known of all prompts when a step is sampled."""
        steps = self._columns["steps"]
        last = max(0, step - 1 - self._staleness)
        later = (steps > last).sum(1)
        assert later.max() <= self._staleness, "a step is noted before it is trained on"
        # The draws up to the last one that is known, of each row.
        columns = np.arange(steps.shape[1] - DRAWS_KEPT, steps.shape[1]) - later[:, None]
        found = {name: np.take_along_axis(column, columns, 1) for name, column in self._columns.items()}
        return History(step=step, **found)


def curriculum_of(config: RolloutTrainingConfig, prompts: Sequence[Prompt]) -> Curriculum | None:
    """Returns the curriculum of a run; None where it takes its prompts in epochs."""
    chosen = config.data.curriculum
    if chosen.name == "uniform":
        return None
    settings: dict[str, Any] = {}
    options = chosen.options
    if not isinstance(chosen, CustomFunction):
        settings["half_life"] = options["half_life"]
    if chosen.name == "pools":
        settings["pools"] = (options["hard"], options["easy"])
    return Curriculum(
        [prompt.prompt_id for prompt in prompts],
        bound(CURRICULA, chosen.name, options),
        name=chosen.name,
        seed=config.run.seed,
        staleness=config.rollout.max_staleness,
        score_range=config.data.score_range,
        **settings,
    )
