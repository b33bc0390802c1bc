"""Rounds of generation until a step is full: order of the calls, kept prompts, and resumption."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.groups.rollouts import Rollouts
from megarl.loop.sampler import RolloutParts, Sampled, Sampler
from megarl.loop.scoring import ScoredSamples
from megarl.types import Prompt, SampleInfo, SampleRequest
from tests.loop.answers import answer, info, run
from tests.loop.simulation import differ

PROMPTS = [Prompt(prompt_id=f"p{index}", token_ids=(index,)) for index in range(5)]
SAMPLES = 2
PER_STEP = 2


class World:
    """Engines, a scorer and a colocation that record their calls; a sample's score comes from its id.

    Args:
        worth: scores of the samples of a prompt in a step, by its number among those that are drawn of it.
    """

    shared = True

    def __init__(self, worth: Mapping[str, Sequence[float]], *, model: bool = True) -> None:
        self.worth, self.model = worth, object() if model else None
        self.asked: list[list[SampleRequest]] = []
        self.moves: list[str] = []
        self.picked: list[str] = []

    def generate(self, requests: Sequence[SampleRequest], chunks: int) -> Any:
        self.asked.append(list(requests))
        samples = tuple(info(each.sample_id, each.prompt.prompt_id, row) for row, each in enumerate(requests))
        rollouts = Rollouts(samples=samples, chunks=OneChunk())
        return SimpleNamespace(rollouts=rollouts, result=lambda: answer(rollouts))

    async def pick(self, rollouts: Rollouts, samples: Sequence[SampleInfo], chunks: int) -> Rollouts:
        self.picked = [sample.sample_id for sample in samples]
        moved = tuple(replace(sample, chunk=0, row=row) for row, sample in enumerate(samples))
        return Rollouts(samples=moved, chunks=OneChunk())

    async def score(self, rollouts: Rollouts, prompts: Mapping[str, Prompt], functions: object) -> ScoredSamples:
        assert {sample.prompt_id for sample in rollouts.samples} <= prompts.keys()
        scores = np.float32([self.worth_of(sample) for sample in rollouts.samples])
        return ScoredSamples(samples=rollouts.samples, scores={"rule": scores})

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    def worth_of(self, sample: SampleInfo) -> float:
        index = sample.sample_id.rpartition("/")[2]
        return 100.0 if index == "greedy" else self.worth[sample.prompt_id][int(index)]

    async def to_training(self) -> None:
        self.moves.append("training")

    async def to_rollout(self) -> None:
        self.moves.append("rollout")


class OneChunk:
    """Stands for the references to a chunk."""

    _refs: Mapping[int, object] = {0: object()}

    def __len__(self) -> int:
        return 1

    def only(self, chunks: object) -> OneChunk:
        return self


def sampler(world: World, *, rounds: int = 0, greedy: bool = False) -> Sampler:
    config: Any = SimpleNamespace(
        run=SimpleNamespace(seed=3),
        reward=SimpleNamespace(functions=()),
        data=SimpleNamespace(prompts_per_step=PER_STEP, samples_per_prompt=SAMPLES),
        rollout=SimpleNamespace(inference_parts=1),
    )
    part: Any = world
    parts = RolloutParts(engines=part, generator=part, scorer=part, colocation=part)
    keep = differ if rounds else None
    return Sampler(config, PROMPTS, parts, 4, keep=keep, max_rounds=rounds, greedy=greedy)


def take(sampler: Sampler, step: int) -> Sampled:
    """Samples a step that is then trained on."""

    async def scored() -> Sampled:
        sampled = await sampler.sample(step)
        await sampled.scoring
        if sampled.greedy is not None:
            await sampled.greedy
        return sampled

    sampled = run(scored())
    sampler.forget(step)
    return sampled


def ids(sampled: Sampled) -> list[str]:
    return [sample.sample_id for sample in sampled.rollouts.samples]


def scores(sampled: Sampled) -> list[float]:
    return sampled.scoring.result().scores["rule"].tolist()


SAYS = {f"p{index}": [0.0, 1.0] * 4 for index in range(5)}
NOTHING = {f"p{index}": [1.0] * 8 for index in range(5)}


def test_a_step_takes_the_next_prompts() -> None:
    world = World(SAYS)
    first = take(sampler(world), 1)
    assert world.moves == ["rollout", "training"]
    assert ids(first) == [f"1/{prompt.prompt_id}/{index}" for prompt in first.prompts for index in range(SAMPLES)]
    assert scores(first) == [0, 1, 0, 1]
    assert first.greedy is None
    assert first.metrics == {}


def test_sampling_continues_until_the_step_is_full() -> None:
    """The prompts at 1, 2 and 4 pass the filter: two rounds fill the step, with one to spare."""
    order = [prompt.prompt_id for prompt in take(sampler(World(SAYS)), 1).prompts]
    stream = sampler(World(SAYS))
    order = [prompt.prompt_id for step in (1, 2) for prompt in take(stream, step).prompts]
    worth = {**NOTHING, order[1]: SAYS["p0"], order[2]: SAYS["p0"], order[3]: SAYS["p0"]}
    world = World(worth)
    found = take(sampler(world, rounds=5), 7)
    assert [prompt.prompt_id for prompt in found.prompts] == order[1:3]
    assert ids(found) == world.picked == [f"7/{prompt}/{index}" for prompt in order[1:3] for index in range(SAMPLES)]
    assert scores(found) == [0, 1, 0, 1]
    assert world.moves == ["rollout", "training", "rollout", "training", "training"]
    counts = {"filter/rounds": 2, "filter/groups": 4, "filter/groups_kept": 0.75, "filter/filled": 0}
    assert found.metrics == counts


def test_a_repeated_prompt_in_a_step_gets_new_samples() -> None:
    """Three rounds of two prompts each, of five."""
    world = World(NOTHING)
    found = take(sampler(world, rounds=3), 1)
    asked = [request for requests in world.asked for request in requests]
    assert len(asked) == 12
    assert len({request.sample_id for request in asked}) == len({request.seed for request in asked}) == 12
    assert ids(found) == [request.sample_id for request in asked[:4]], "what was left out fills the step, in order"
    assert found.metrics["filter/filled"] == 2
    assert found.metrics["filter/groups_kept"] == 0.0


def test_without_a_reward_model_the_engines_keep_the_devices() -> None:
    world = World(NOTHING, model=False)
    take(sampler(world, rounds=2), 1)
    assert world.moves == ["rollout", "rollout", "training"]


def test_a_full_first_round_is_used_unchanged() -> None:
    world = World(SAYS)
    found = take(sampler(world, rounds=3), 1)
    assert world.picked == []
    assert found.rollouts.samples == world.generate(world.asked[0], 4).rollouts.samples


def test_greedy_responses_are_those_of_the_kept_prompts() -> None:
    order = [prompt.prompt_id for prompt in take(sampler(World(SAYS)), 1).prompts]
    world = World({**SAYS, order[0]: [1.0] * 8})
    found = take(sampler(world, rounds=3, greedy=True), 1)
    kept = [prompt.prompt_id for prompt in found.prompts]
    assert order[0] not in kept
    assert [(request.sample_id, request.temperature) for request in world.asked[-1]] == [
        (f"1/{prompt}/greedy", 0.0) for prompt in kept
    ]
    assert world.moves[-2:] == ["rollout", "training"]
    assert found.greedy is not None
    assert [sample.prompt_id for sample in found.greedy.result().samples] == kept
    assert found.greedy.result().scores["rule"].tolist() == [100.0] * PER_STEP


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_resumed_sampler_continues_where_the_last_one_stopped(rounds: int) -> None:
    """For any number of prompts per round."""
    worth = {**SAYS, "p1": [1.0] * 8, "p3": [1.0] * 8}
    straight = sampler(World(worth), rounds=rounds)
    expected = [ids(take(straight, step)) for step in range(1, 7)]
    first = sampler(World(worth), rounds=rounds)
    for step in range(1, 4):
        take(first, step)
    resumed = sampler(World(worth), rounds=rounds)
    resumed.load(first.state())
    assert [ids(take(resumed, step)) for step in range(4, 7)] == expected[3:]
