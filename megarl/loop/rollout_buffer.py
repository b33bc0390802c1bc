"""Samples steps ahead of the training within `rollout.max_staleness`, and returns them in order.

Step t may be sampled once the engines have version t - 1 - S or a later one, S being the staleness,
so that no token is more than S versions old when it is trained on (AReaL's bound, at admission). A
step is trained on exactly its own samples, in their order. The modes differ in what happens to
responses in progress when new weights are due:

- exact: they are finished first. Steps are sampled one after the other, step t wholly by version
  max(0, t - 1 - S), so that a run can be repeated. S = 0 is the synchronous loop.
- bounded: they are finished first, and steps overlap. The engines skip a version where the next
  step is ready and responses are in progress.
- inflight: they go on with the new weights.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.cluster.calls import WorkerError
from megarl.cluster.ray_worker import ChunkRefs
from megarl.config import RolloutTrainingConfig
from megarl.data.branches import Branches
from megarl.data.packing import sample_infos
from megarl.groups.colocation import Colocation
from megarl.groups.engines import RolloutGroup
from megarl.groups.rollouts import Rollouts
from megarl.loop.sampler import Sampled, Sampler, Scoring, known_scores
from megarl.loop.scoring import ScoredSamples
from megarl.rollout.completions import load_chunks, save_chunks
from megarl.rollout.requests import sampling_settings
from megarl.types import ConversationOutcome, RolloutChunk, SampleInfo

_FORMAT = 3
"""Of saved rollouts: scores are of conversations, rewards of turns are raw, scores of all rounds are kept."""


class RolloutBuffer:
    """The steps that are sampled or being sampled and have not been trained on.

    Where trainers and engines have devices of their own, sampling goes on while the driver waits
    for any call; else steps are sampled before one is trained on.
    """

    def __init__(
        self, config: RolloutTrainingConfig, sampler: Sampler, engines: RolloutGroup, colocation: Colocation
    ) -> None:
        self._staleness = config.rollout.max_staleness
        self._mode = config.rollout.mode
        self._last = config.steps
        self._sampler = sampler
        self._engines = engines
        self._colocation = colocation
        self._overlaps = self._staleness > 0 and not colocation.shared
        self._rollout = config.rollout
        self._sampling = sampling_settings(config.rollout, config.recorded_kept_max)
        self._sizes = config.data.prompts_per_step, config.data.samples_per_prompt
        self.version = 0  # of the engines
        self._taken = 0  # version of the actor
        self._steps: dict[int, asyncio.Task[Sampled]] = {}
        self._loaded: dict[int, Callable[[], Coroutine[Any, Any, Sampled]]] = {}  # to be scored
        self._background: list[asyncio.Task[Any]] = []

    def begin(self, step: int) -> None:
        """Starts after a step, whose weights the engines have."""
        self._taken = step
        self._engines.restore = self._restore
        if self._overlaps:
            for loaded in sorted(self._loaded):
                self._start(loaded)
        self.synced(step)

    async def take(self, step: int) -> Sampled:
        """Waits for the samples of a step, and returns them; their scores may be in progress."""
        self._admit()
        if not self._overlaps:
            for due in range(step, min(step + self._staleness, self._last) + 1):
                await self._engines.require(self._start(due))
        sampled = await self._engines.require(self._steps[step])
        await self._colocation.to_training()
        del self._steps[step]
        self._taken = step
        self._sampler.forget(step)
        return sampled

    def note(self, step: int, scores: Mapping[str, Sequence[float]]) -> None:
        """Takes the known scores of the prompts of a step that is trained on; see `Curriculum`."""
        self._sampler.note(step, scores)

    async def prepare_sync(self) -> None:
        """Waits for what only the present weights may sample."""
        if self._overlaps and self._mode == "exact":
            await self._engines.require(self._sample_admitted())

    async def _sample_admitted(self) -> None:
        """Waits until all that may be sampled is sampled, and other work of the engines is done."""
        self._admit()
        while unfinished := [*self._in_progress, *self._unfinished]:
            await asyncio.wait(unfinished)
            self._admit()

    def synced(self, version: int) -> None:
        """Goes on with new weights in the engines."""
        self.version = version
        self._admit()

    def skips_sync(self, step: int) -> bool:
        """Returns whether a sync may wait for the responses in progress: the next step is sampled."""
        following = self._steps.get(step + 1)
        ready = following is not None and following.done()
        return self._overlaps and self._mode == "bounded" and ready and not self._engines.idle

    def run_beside(self, work: Coroutine[Any, Any, Any]) -> None:
        """Starts other work of the engines, which goes on as sampling does."""
        self._background.append(self._engines.spawn(work))

    async def take_results(self, *, wait: bool) -> list[Any]:
        """Pops the results of finished work, in the order of its start; with `wait`, of all of it."""
        if wait and self._unfinished:
            await self._engines.require(asyncio.wait(self._unfinished))
        done: list[Any] = []
        while self._background and self._background[0].done():
            done.append(self._background.pop(0).result())
        return done

    async def _restore(self) -> None:
        """Gives new engines the actor's weights; raises WorkerError if the lost ones had others."""
        if self._mode == "exact" and self.version != self._taken:
            raise WorkerError(
                f"{self._engines.replaced[-1]}\nNo engine is left with version {self.version} of the weights, and "
                f"the actor has version {self._taken} by now: resume the run, which samples these steps again"
            )
        await self._colocation.sync(self._taken)
        self.synced(self._taken)

    @property
    def depth(self) -> int:
        """Number of sampled steps that wait for the training."""
        return sum(sampling.done() for sampling in self._steps.values())

    @property
    def _in_progress(self) -> list[asyncio.Task[Sampled]]:
        return [sampling for sampling in self._steps.values() if not sampling.done()]

    @property
    def _unfinished(self) -> list[asyncio.Task[Any]]:
        """Other work that is in progress."""
        return [task for task in self._background if not task.done()]

    def _admit(self) -> None:
        """Starts to sample further steps within the staleness bound, where they overlap."""
        if not self._overlaps:
            return
        last = min(self.version + 1 + self._staleness, self._last)
        for step in range(self._taken + 1, last + 1):
            if self._mode == "exact" and self._in_progress:
                return
            self._start(step)

    def _start(self, step: int) -> asyncio.Task[Sampled]:
        """Starts to sample a step, or to score one that was loaded, unless that has begun."""
        if step not in self._steps:
            sample = self._loaded.pop(step, partial(self._sampler.sample, step))
            sampling = self._engines.spawn(sample())
            self._steps[step] = sampling
            sampling.add_done_callback(self._sampled)
        return self._steps[step]

    def _sampled(self, sampling: asyncio.Task[Sampled]) -> None:
        if not sampling.cancelled() and sampling.exception() is None:
            self._admit()

    def state(self, directory: Path) -> dict[str, Any]:
        """Returns the position in the prompts, and the sampled steps; writes their rollouts to files."""
        state = self._sampler.state()
        steps: dict[str, Any] = {}
        for step, sampling in sorted(self._steps.items()):
            if sampling.done():
                steps[str(step)] = _save(sampling.result(), directory / f"step-{step}")
        if steps:
            state |= {"sampled": steps, "sampling": self._sampling, "format": _FORMAT}
        return state

    def load(self, state: Mapping[str, Any], directory: Path) -> None:
        """Loads `state()`; raises ValueError if the prompts have changed.

        Samples that have become too old for the configuration, or too few, or are of another
        distribution or format, are generated again.
        """
        self._sampler.load(state)
        if (state.get("sampling"), state.get("format")) != (self._sampling, _FORMAT):
            return
        for step, saved in state["sampled"].items():
            prompts = [self._sampler.prompt(prompt_id) for prompt_id in saved["prompts"]]
            rollouts, scoring = _load(saved["samples"], directory / f"step-{step}.npz")
            greedy = greedy_scoring = None
            if saved["greedy"] is not None:
                greedy, greedy_scoring = _load(saved["greedy"], directory / f"step-{step}-greedy.npz")
            is_fresh = _oldest(rollouts) >= int(step) - 1 - self._staleness
            sizes = (len(prompts), len(Branches.of(rollouts.samples).last) // len(prompts))
            if is_fresh and sizes == self._sizes:
                self._loaded[int(step)] = partial(
                    self._sampler.score,
                    prompts,
                    rollouts,
                    greedy,
                    saved["metrics"],
                    scoring,
                    greedy_scoring,
                    scores=saved["scores"],
                )


def _save(sampled: Sampled, path: Path) -> dict[str, Any]:
    """Writes the rollouts of a step to `path` with suffixes; returns all else of it, as JSON."""
    path.parent.mkdir(exist_ok=True)
    greedy = None
    if sampled.greedy_rollouts is not None:
        greedy = _save_rollouts(sampled.greedy_rollouts, sampled.greedy, path.with_name(f"{path.name}-greedy.npz"))
    return {
        "prompts": [prompt.prompt_id for prompt in sampled.prompts],
        "samples": _save_rollouts(sampled.rollouts, sampled.scoring, path.with_name(f"{path.name}.npz")),
        "greedy": greedy,
        "metrics": dict(sampled.metrics),
        "scores": sampled.scores,
    }


def _save_rollouts(rollouts: Rollouts, scoring: Scoring | None, path: Path) -> dict[str, Any]:
    """Writes rollouts; returns their prompts by chunk and row, known scores, and outcomes."""
    chunks = rollouts.fetched()
    save_chunks(path, chunks)
    prompt_ids: list[list[str]] = [[] for _ in chunks]
    outcomes: list[dict[str, Any] | None] = []
    for sample in rollouts.samples:
        prompt_ids[sample.chunk].append(sample.prompt_id)
        outcomes.append(None if sample.outcome is None else asdict(sample.outcome))
    saved: dict[str, Any] = {"prompt_ids": prompt_ids, "scored": None}
    if any(outcomes):
        saved["outcomes"] = outcomes
    if scoring is None or not scoring.done():
        return saved
    known = scoring.result()
    if known.dense is None:  # scores of tokens are computed again
        scores: dict[str, list[float | None]] = {}
        for name, values in known.scores.items():
            numbers = values.astype(object)
            numbers[~np.isfinite(values)] = None
            scores[name] = numbers.tolist()
        ends = [(sample.response_tokens, sample.finished, sample.given_tokens) for sample in known.samples]
        saved["scored"] = {"ends": ends, "scores": scores}
    return saved


def _load(saved: Mapping[str, Any], path: Path) -> tuple[Rollouts, Scoring | None]:
    """Reads rollouts, and their scores if they were known."""
    chunks = load_chunks(path)
    samples: list[SampleInfo] = []
    for index, (chunk, prompt_ids) in enumerate(zip(chunks, saved["prompt_ids"], strict=True)):
        samples += sample_infos(index, chunk, prompt_ids)
    for index, outcome in enumerate(saved.get("outcomes", ())):
        if outcome is not None:
            samples[index] = replace(samples[index], outcome=ConversationOutcome(**outcome))
    rollouts = Rollouts(samples=tuple(samples), chunks=ChunkRefs[RolloutChunk].put(chunks))
    scored = saved["scored"]
    if scored is None:
        return rollouts, None
    truncated: list[SampleInfo] = []
    for sample, (tokens, finished, given) in zip(samples, scored["ends"], strict=True):
        truncated.append(replace(sample, response_tokens=tokens, finished=finished, given_tokens=given))
    scores = {name: np.array(column, dtype=np.float32) for name, column in scored["scores"].items()}  # None becomes NaN
    return rollouts, known_scores(ScoredSamples(samples=truncated, scores=scores))


def _oldest(rollouts: Rollouts) -> int:
    """Returns the oldest version that wrote a token, which conversations that failed may lack."""
    oldest = sys.maxsize
    for chunk in rollouts.fetched():
        for spans in chunk.versions:
            oldest = min([oldest, *(span.version for span in spans)])
    return oldest
