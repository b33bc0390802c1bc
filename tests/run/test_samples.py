"""Contents of samples.jsonl."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megarl.config import load
from megarl.conversations.conversation import Branch, Conversation
from megarl.conversations.environment_process import pack_conversations
from megarl.dashboard.view.sample_index import SampleIndex
from megarl.data.packing import sample_infos
from megarl.files import read_lines
from megarl.groups.rollouts import Rollouts
from megarl.run.paths import RunPaths
from megarl.run.report import EvaluationReporter
from megarl.run.results import ShownSample, prompt_scores, shown_samples
from megarl.types import Prompt, Ragged, RolloutChunk, SampledTurn, SampleRequest, VersionSpan
from tests.config.debug import DEBUG

SAMPLE = ShownSample(
    sample_id="p1/0",
    prompt_id="p1",
    prompt="up ba:",
    response="ab",
    text="up ba:ab<eos>",
    fields={"answer": "ab"},
    prompt_tokens=6,
    response_tokens=3,
    versions=(0,),
    finished=True,
    score=0.5,
    scores={"reward_model": 0.25, "exact_match": 1.0},
    advantage=None,
)


def test_every_sample_is_a_line_and_a_second_writer_appends(tmp_path: Path) -> None:
    config, paths = load(DEBUG, ["tracking.tensorboard=false"]), RunPaths(tmp_path)
    for step in (1, 2):
        with EvaluationReporter(config, paths) as reporter:
            others = [SAMPLE, replace(SAMPLE, sample_id="p1/1", prompt=(5, 6), finished=False)]
            reporter.write_samples(step, "train", others)
            reporter.write_samples(step, "evaluation", [SAMPLE])
    lines = [json.loads(line) for line in paths.samples.read_text().splitlines()]
    assert [(line["step"], line["kind"], line["sample_id"]) for line in lines] == [
        (step, kind, sample)
        for step in (1, 2)
        for kind, sample in (("train", "p1/0"), ("train", "p1/1"), ("evaluation", "p1/0"))
    ]
    fields = {name: value for name, value in asdict(SAMPLE).items() if name not in ("tokens", "turns", "outcome")}
    assert lines[0] == {"step": 1, "kind": "train", **fields, "versions": [0]}
    assert lines[1]["prompt"] == [5, 6]


STEP_BYTES = 150_000
"""Of a step below: more than 1 MiB are seven of them."""


def written(paths: RunPaths, steps: Iterable[int], half_bytes: int = STEP_BYTES // 2) -> None:
    """Writes steps of a run whose file has at most 1 MiB, with a short evaluation after every fourth one."""
    config = load(DEBUG, ["tracking.tensorboard=false", "tracking.samples_mib=1"])
    with EvaluationReporter(config, paths) as reporter:
        for step in steps:
            half = replace(SAMPLE, response="é" * (half_bytes // 2))
            reporter.write_samples(step, "train", [half, replace(half, sample_id="p1/1")])
            if step % 4 == 0:
                reporter.write_samples(step, "evaluation", [SAMPLE])


def steps_of(path: Path, kind: str) -> list[int]:
    return list(dict.fromkeys(line["step"] for line in read_lines(path) if line["kind"] == kind))


def test_a_full_file_has_fewer_steps_of_its_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: there is room for six steps, and for five after steps have left; of seven, two leave, one by one."""
    paths = RunPaths(tmp_path)
    view = SampleIndex(paths)
    written(paths, range(1, 7))
    assert (steps_of(paths.samples, "train"), capsys.readouterr().out) == ([1, 2, 3, 4, 5, 6], "")
    view.update()
    written(paths, range(7, 10))
    printed = capsys.readouterr().out
    assert printed.count("tracking.samples_mib (1.0 MiB)") == printed.count("\n") == 1
    assert steps_of(paths.samples, "train") == [1, 6, 7, 8, 9]
    assert steps_of(paths.samples, "evaluation") == [4, 8], "they are small"
    view.update()
    assert [step for step, samples in view.steps("train") if samples == 2] == [1, 6, 7, 8, 9]
    assert view.samples("train", 7, "p1")[1]["sample_id"] == "p1/1"
    written(paths, range(10, 60))
    kept = steps_of(paths.samples, "train")
    assert kept[0] == 1
    assert kept[-3:] == [57, 58, 59]
    assert paths.samples.stat().st_size <= 1 << 20
    assert sorted(file.name for file in tmp_path.iterdir() if "samples" in file.name) == ["samples.jsonl"]


def test_the_newest_steps_stay_even_if_they_are_too_large(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    written(paths, range(1, 8), half_bytes=1 << 20)
    assert steps_of(paths.samples, "train") == [1, 6, 7]


def rollouts(prompt_ids: list[str]) -> Rollouts:
    """A chunk with a response of one token to each prompt; token i is of sample i."""
    count = len(prompt_ids)
    chunk = RolloutChunk(
        sample_ids=tuple(f"{prompt}/{i}" for i, prompt in enumerate(prompt_ids)),
        prompt_ids=Ragged.from_rows([[7, 8]] * count, np.int32),
        response_ids=Ragged.from_rows([[i] for i in range(count)], np.int32),
        rollout_logprobs=Ragged.from_rows([[0.0]] * count, np.float32),
        finished=np.ones(count, dtype=np.bool_),
        versions=tuple((VersionSpan(start=0, stop=1, version=4, engine_id=0),) for _ in range(count)),
    )
    chunks: Any = [chunk]
    return Rollouts(samples=tuple(sample_infos(0, chunk, prompt_ids)), chunks=chunks)


class Letters:
    """A tokenizer whose token i is the letter i of the alphabet, and which drops the space before a first letter."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(f" {chr(97 + i)}" if i % 2 else chr(97 + i) for i in ids).lstrip()


def test_token_values_are_written_if_configured() -> None:
    """By token: the engine's log-probability, what the columns have, and the text, also of a space at the beginning."""
    ids = Ragged.from_rows([[1, 2, 1]], np.int32)
    drawn = rollouts(["p"])
    [chunk] = cast(Any, drawn.chunks)
    logprobs = Ragged.from_rows([[-0.25, -1 / 3, -2]], np.float32)
    chunks: Any = [replace(chunk, response_ids=ids, rollout_logprobs=logprobs)]
    prompts = {"p": Prompt(prompt_id="p", token_ids=(7, 8), fields={})}
    score, letters = np.ones(1, dtype=np.float32), cast(Any, Letters())
    columns = {"advantages": Ragged.from_rows([[1, 0, -1]], np.float32)}
    arguments = (replace(drawn, chunks=chunks), prompts, score, {}, letters, "all")
    [kept] = shown_samples(*arguments, columns=lambda _: columns)
    assert kept.tokens == {
        "text": [" b", "c", " b"],
        "rollout_logprobs": [-0.25, -0.333333, -2.0],
        "advantages": [1.0, 0.0, -1.0],
    }
    [without] = shown_samples(*arguments)
    assert without.tokens is None
    chunks[0] = replace(
        chunks[0],
        response_ids=Ragged.from_rows([[1, 3, 2, 1, 5]], np.int32),
        loss_mask=Ragged.from_rows([[True, False, True, True, False]], np.bool_),
    )
    samples = (replace(drawn.samples[0], response_tokens=3, given_tokens=2),)
    conversation = replace(drawn, samples=samples, chunks=chunks)
    [shown_conversation] = shown_samples(conversation, *arguments[1:], columns=lambda _: columns)
    assert shown_conversation.tokens == {
        "text": [" b", " d", "c", " b", " f"],
        "rollout_logprobs": [-0.25, None, -0.333333, -2.0, None],
        "advantages": [1.0, None, 0.0, -1.0, None],
        "loss_mask": [1, 0, 1, 1, 0],
    }


def test_turns_are_distinguished_with_their_rewards() -> None:
    """Of a conversation of two branches, the second of which ends in a turn without tokens, and of one that failed."""
    prompt = Prompt(prompt_id="p", token_ids=(2,))

    def branch(*turns: tuple[Sequence[int], Sequence[int], float]) -> Branch:
        grown = Branch(prompt=(2,))
        for given, sampled, reward in turns:
            grown.give(given)
            span = VersionSpan(start=0, stop=len(sampled), version=4, engine_id=0)
            logprobs = np.zeros(len(sampled), dtype=np.float32)
            grown.add(SampledTurn(token_ids=tuple(sampled), logprobs=logprobs, finished=True, versions=(span,)))
            grown.rewards[-1] = reward
        return grown

    conversation = Conversation(request=SampleRequest(sample_id="1/p/0", prompt=prompt, seed=0), metrics={"asked": 2.0})
    conversation.branches = [branch(((), (1, 3), 0.5), ((5, 6), (7,), 0.25)), branch(((), (1,), -1.0), ((9,), (), 2.0))]
    failed = Conversation(request=SampleRequest(sample_id="1/p/1", prompt=prompt, seed=0), failure="no way")
    chunk, names = pack_conversations([conversation, failed], filler=0)
    infos = sample_infos(0, chunk, names)
    samples = tuple(replace(info, outcome=conversation.outcome if info.row < 2 else failed.outcome) for info in infos)
    chunks: Any = [chunk]
    drawn, score = Rollouts(samples=samples, chunks=chunks), np.ones(3, dtype=np.float32)
    first, second, third = shown_samples(drawn, {"p": prompt}, score, {}, cast(Any, Letters()), "all")
    turns = [[(turn.sampled, turn.text, turn.tokens, turn.reward) for turn in of.turns or ()] for of in (first, second)]
    assert turns == [
        [(True, " b d", 2, 0.5), (False, " fg", 2, None), (True, " h", 1, 0.25)],
        [(True, " b", 1, -1.0), (True, "", 0, 2.0)],
    ]
    assert (first.versions, first.outcome) == ((4,), conversation.outcome)
    assert third.turns == []
    assert third.outcome is not None
    assert third.outcome.failure == "no way"


def shown(prompt_ids: list[str], count: int) -> list[ShownSample]:
    scores = np.arange(len(prompt_ids), dtype=np.float32)
    fields = {"when": datetime.date(2026, 1, 2)}  # of a Parquet file
    prompts = {name: Prompt(prompt_id=name, token_ids=(7, 8), fields=fields) for name in prompt_ids}
    return shown_samples(rollouts(prompt_ids), prompts, scores, {"own": scores}, None, count, scores / 2)


@pytest.mark.parametrize(("count", "prompts"), [(0, 0), (1, 1), (4, 1), (5, 2), (12, 3), (99, 5)])
def test_whole_groups_are_written(count: int, prompts: int) -> None:
    ids = [f"p{i}" for i in range(5) for _ in range(4)]
    found = shown(ids, count)
    assert len(found) == 4 * prompts
    assert len({sample.prompt_id for sample in found}) == prompts
    for sample in found:
        index = int(sample.score)
        assert (sample.sample_id, sample.response, sample.advantage) == (f"{ids[index]}/{index}", (index,), index / 2)
        assert (sample.versions, sample.text, sample.fields) == ((4,), None, {"when": "2026-01-02"})


def test_fixed_prompts_are_written_in_every_step_that_has_them() -> None:
    steps = [{s.prompt_id for s in shown([f"p{i}" for i in range(first, first + 20)], 4)} for first in range(10)]
    common = set.intersection(*steps[:3])
    assert common
    assert all(len(step) == 4 for step in steps)
    assert len(set.union(*steps)) > 8


def test_scores_belong_to_their_responses() -> None:
    values = {"own": np.array([1, 0, np.nan], dtype=np.float32)}
    scores = prompt_scores(rollouts(["a", "a", "b"]).samples, values)
    assert scores["a"] == {"own": [1.0, 0.0]}
    assert np.isnan(scores["b"]["own"]).all()
