"""Processes that score: shares of the chunks, results, and the failure of a user's function."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import ray
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megarl.cluster.calls import Watch, WorkerError
from megarl.cluster.rollouts import Rollouts
from megarl.cluster.scoring import RuleScorers, by_chunk
from megarl.cluster.session import Session
from megarl.cluster.shell import ChunkRefs
from megarl.config.schema import RewardFunction, TimeLimits
from tests.rewards.answers import infos, own, prompt, rollout

PROMPTS = {name: prompt(f"p{name}", name, answer=answer) for name, answer in {"a": "one", "b": "three"}.items()}


@pytest.fixture(scope="module")
def scorers(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuleScorers]:
    """Two processes with a tokenizer whose ids are the characters' codes."""
    directory = tmp_path_factory.mktemp("tokenizer")
    letters = Tokenizer(WordLevel({chr(code): code for code in range(128)}, unk_token="\0"))
    letters.decoder = Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="\4").save_pretrained(directory)
    made = RuleScorers(session, str(directory), 2)
    made.start().wait()
    yield made
    for process in made.processes:
        ray.kill(process.actor)


@pytest.fixture
def forgetful(session: Session) -> Iterator[None]:
    """Forgets the calls that failed, as a run's end would."""
    yield
    session.watch = Watch(TimeLimits())


def rollouts(chunks: int) -> Rollouts:
    """Chunks of two samples: an answer to a, as many letters too long as the chunk's number says, and one to b."""
    prompts = [PROMPTS["a"], PROMPTS["b"]]
    made = [rollout(prompts, ["one" + "x" * chunk, "three\4"], [True, False]) for chunk in range(chunks)]
    samples = [info for chunk, rows in enumerate(made) for info in infos(chunk, prompts, rows)]
    refs = {chunk: ray.put(rows) for chunk, rows in enumerate(made)}
    return Rollouts(samples=tuple(reversed(samples)), chunks=ChunkRefs(refs))


@pytest.mark.dist
def test_every_chunk_is_scored_by_every_function(scorers: RuleScorers) -> None:
    functions = [own("length"), RewardFunction(name="exact_match"), own("seen"), own("process")]
    given = rollouts(5)
    scores = by_chunk(scorers.score(functions, given, PROMPTS))
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


@pytest.mark.dist
def test_chunks_may_be_fewer_than_processes(scorers: RuleScorers) -> None:
    scores = by_chunk(scorers.score([own("length")], rollouts(1), PROMPTS))
    assert {chunk: column["length"].tolist() for chunk, column in scores.items()} == {0: [3, 6]}


@pytest.mark.dist
@pytest.mark.usefixtures("forgetful")
def test_a_failing_function_is_named_with_its_prompt_and_its_traceback(scorers: RuleScorers) -> None:
    with pytest.raises(WorkerError) as failed:
        by_chunk(scorers.score([own("quotient", size=6)], rollouts(2), PROMPTS))
    text = str(failed.value)
    assert text.startswith("scorer ")
    assert "failed in scorers.score: RewardError(\"reward function 'quotient' failed on prompt 'b'" in text
    assert "return 1.0 / (len(answer.response_ids) - size)" in text, "the user's line is missing"
