"""The processes that run reward functions: they share the samples of a step and return small columns of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megarl.cluster.calls import Call
from megarl.cluster.rollouts import Rollouts
from megarl.cluster.session import Session
from megarl.cluster.shell import ChunkRefs
from megarl.config.schema import RewardFunction
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards import RuleScorer
from megarl.types import Prompt, RolloutChunk, SampleInfo

Scores = dict[str, npt.NDArray[np.float32]]
"""By label of the function, [N] float32 of the N samples of a chunk."""

SCORER = "megarl.cluster.scoring:ScoringProcess"


class ScoringProcess:
    """What runs in each process.

    Args:
        tokenizer: directory of the tokenizer that makes the texts of the answers; None leaves them empty.
    """

    def __init__(self, tokenizer: str | None) -> None:
        self._decode = None if tokenizer is None else load_tokenizer(tokenizer).decode

    def start(self) -> None:
        """Nothing is left to do once the object is made; mistakes in making it show here."""

    def score(
        self,
        functions: Sequence[RewardFunction],
        rollouts: Mapping[int, RolloutChunk] | ChunkRefs[RolloutChunk],
        prompts: Mapping[int, Sequence[Prompt]],
    ) -> dict[int, Scores]:
        """The scores of some chunks.

        Args:
            functions: that score.
            rollouts: by chunk.
            prompts: by chunk, those of its rows.
        """
        scorer = RuleScorer(functions, self._decode)
        return {chunk: scorer.score(rollouts[chunk], of_rows) for chunk, of_rows in prompts.items()}


class RuleScorers:
    """Processes without a device of their own, spread over the nodes of the run.

    Args:
        session: where they run.
        tokenizer: directory of the tokenizer; None where the run has none.
        processes: how many.
    """

    def __init__(self, session: Session, tokenizer: str | None, processes: int) -> None:
        self._watch = session.watch
        devices = len(session.placement.slots)
        self.processes = [
            session.launch_beside(f"scorer {index}", index * devices // processes, SCORER, tokenizer)
            for index in range(processes)
        ]

    def start(self) -> Call:
        """Loads the tokenizer in every process."""
        return self._watch.submit("scorers.start", "start", "start", self.processes, [()] * len(self.processes))

    def score(self, functions: Sequence[RewardFunction], rollouts: Rollouts, prompts: Mapping[str, Prompt]) -> Call:
        """Scores samples; returns at once. ``by_chunk`` reads the results.

        Args:
            functions: that score, all of them every sample.
            rollouts: of the step.
            prompts: by prompt id, those of the rollouts.
        """
        of_rows = _prompts_by_chunk(rollouts.samples, prompts)
        count = min(len(self.processes), len(of_rows))
        shares = [{chunk: of_rows[chunk] for chunk in sorted(of_rows)[index::count]} for index in range(count)]
        args = [(tuple(functions), rollouts.chunks.only(share), share) for share in shares]
        return self._watch.submit("scorers.score", "scoring", "score", self.processes[:count], args)


def by_chunk(call: Call) -> dict[int, Scores]:
    """Waits for the scores and joins them.

    Raises:
        WorkerError: a process failed; of a reward function's failure the message names function and prompt.
    """
    return {chunk: scores for result in call.wait() for chunk, scores in result.items()}


def _prompts_by_chunk(samples: Sequence[SampleInfo], prompts: Mapping[str, Prompt]) -> dict[int, list[Prompt]]:
    """By chunk, the prompt of each row."""
    of_rows: dict[int, list[Prompt]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.chunk, sample.row)):
        of_rows.setdefault(sample.chunk, []).append(prompts[sample.prompt_id])
    return of_rows
