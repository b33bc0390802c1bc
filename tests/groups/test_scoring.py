"""Scorer processes: division of the chunks, results, and functions that fail or hang."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.config.schema import Reward, RewardFunction, TimeLimits
from megarl.groups.rollouts import Rollouts
from megarl.groups.scorers import RuleScorers, ScoringProcess
from tests.cluster.conftest import answer_of, kill
from tests.rewards.completions import infos, own, prompt, rollout

pytestmark = [pytest.mark.process, pytest.mark.dist]

PROMPTS = {name: prompt(f"p{name}", name, answer=answer) for name, answer in {"a": "one", "b": "three"}.items()}


FUNCTIONS = (
    own("length"),
    RewardFunction(name="exact_match"),
    own("seen"),
    own("process"),
    own("quotient", size=6),
    own("stubborn"),
    RewardFunction(name="tests.rewards.overlapping_functions:ranks", per="group"),
)
LENGTH, EXACT_MATCH, SEEN, PROCESS, QUOTIENT, STUBBORN, RANKS = FUNCTIONS


@pytest.fixture(scope="module")
def scorers(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuleScorers]:
    """Two processes with a tokenizer whose ids are the characters' codes."""
    directory = tmp_path_factory.mktemp("tokenizer")
    letters = Tokenizer(WordLevel({chr(code): code for code in range(128)}, unk_token="\0"))
    letters.decoder = Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="\4").save_pretrained(directory)
    reward = Reward(processes=2, time_limit=3.0, retries=0)
    made = RuleScorers(session, str(directory), FUNCTIONS, reward, TimeLimits())
    session.run(answer_of(lambda: made.call(ScoringProcess.start)))
    yield made
    kill(made)


def rollouts(chunks: int) -> Rollouts:
    """Chunks of two samples: an answer to a, as many letters too long as the chunk's number says, and one to b."""
    prompts = [PROMPTS["a"], PROMPTS["b"]]
    made = [rollout(prompts, ["one" + "x" * chunk, "three\4"], [True, False]) for chunk in range(chunks)]
    samples = [info for chunk, rows in enumerate(made) for info in infos(chunk, prompts, rows)]
    refs = {chunk: ray.put(rows) for chunk, rows in enumerate(made)}
    return Rollouts(samples=tuple(reversed(samples)), chunks=ChunkRefs(refs))


async def test_every_chunk_is_scored_by_every_function(scorers: RuleScorers) -> None:
    given = rollouts(5)
    scores = await scorers.gather(scorers.score([LENGTH, EXACT_MATCH, SEEN, PROCESS], given, PROMPTS))
    assert {chunk: column["length"].tolist() for chunk, column in scores.items()} == {c: [3 + c, 6] for c in range(5)}
    assert {chunk: column["exact_match"].tolist() for chunk, column in scores.items()} == {
        0: [1, 1],
        **{chunk: [0, 1] for chunk in range(1, 5)},
    }
    assert scores[0]["seen"].tolist() == [1, 1]
    processes = np.array([scores[chunk]["process"] for chunk in range(5)])
    assert (processes == processes[[0, 1, 0, 1, 0]]).all()
    assert len(set(processes.flat)) == 2, "one process did it all"
    assert not given.chunks._fetched, "the driver has fetched a chunk"
    scores = await scorers.gather(scorers.score([LENGTH], rollouts(1), PROMPTS))
    assert {chunk: column["length"].tolist() for chunk, column in scores.items()} == {0: [3, 6]}, "fewer than processes"


async def test_all_responses_to_a_prompt_are_scored_together(scorers: RuleScorers) -> None:
    """Those to a are longer in each chunk; those to b are equal."""
    scores = await scorers.gather(scorers.score([RANKS, LENGTH, PROCESS], rollouts(5), PROMPTS))
    assert {chunk: column["ranks"].tolist() for chunk, column in scores.items()} == {c: [c, 0] for c in range(5)}
    assert {chunk: column["length"].tolist() for chunk, column in scores.items()} == {c: [3 + c, 6] for c in range(5)}
    processes = np.array([scores[chunk]["process"] for chunk in range(5)])
    assert [len(set(column)) for column in processes.T] == [1, 1]
    assert len(set(processes.flat)) == 2


async def test_parts_of_a_step_get_the_scores_of_the_whole_step(scorers: RuleScorers) -> None:
    given = rollouts(4)
    whole = await scorers.gather(scorers.score([EXACT_MATCH, PROCESS], given, PROMPTS))
    parts = [await scorers.gather(scorers.score([EXACT_MATCH, PROCESS], part, PROMPTS)) for part in given.parts(4)]
    for chunk, scores in enumerate(parts):
        assert {name: values.tolist() for name, values in scores[chunk].items()} == {
            name: values.tolist() for name, values in whole[chunk].items()
        }
    assert len({scores[chunk]["process"][0] for chunk, scores in enumerate(parts)}) == 2


async def test_a_failure_is_shown_once_with_its_prompt_and_its_traceback(
    scorers: RuleScorers, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        scores = await scorers.gather(scorers.score([QUOTIENT, LENGTH], rollouts(4), PROMPTS))
        unscored = {chunk: np.isnan(column["quotient"]).tolist() for chunk, column in scores.items()}
        assert unscored == {0: [False, True], 1: [False, True], 2: [False, True], 3: [True, True]}
        assert scores[3]["length"].tolist() == [6, 6]
    told = capsys.readouterr().err
    assert told.count("'quotient'") == 1
    assert told.startswith("reward function 'quotient' gave prompt 'b' no score (calls: 1)")
    assert "rewards/unscored" in told
    assert "return 1.0 / (len(completion.response_ids) - size)" in told, "the user's line is missing"
    (last,) = scorers.failures
    assert last.startswith("reward function 'quotient' on prompt 'b': ")
    assert last.endswith("ZeroDivisionError: float division by zero")


async def test_a_hanging_function_loses_only_its_sample(
    scorers: RuleScorers, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    scores = await scorers.gather(scorers.score([STUBBORN], rollouts(2), PROMPTS))
    assert time.monotonic() - start < 60
    for column in scores.values():
        np.testing.assert_array_equal(column["stubborn"], np.float32([1, math.nan]))
    assert "it took longer than 3 s, and was ended" in capsys.readouterr().err


async def test_child_processes_end_on_close(scorers: RuleScorers) -> None:
    scores = await scorers.gather(scorers.score([PROCESS], rollouts(2), PROMPTS))
    children = {int(pid) for column in scores.values() for pid in column["process"]}
    assert len(children) == 2
    assert all(Path(f"/proc/{pid}").exists() for pid in children)
    await scorers.call(ScoringProcess.close)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
