"""Engines and the answers of fresh engines; one engine process per tensor-parallel size serves all tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megarl.config.schema import Rollout
from megarl.rollout.engine_options import EngineOptions
from megarl.types import Prompt, Ragged, RolloutChunk, SampleRequest
from tests.rollout import in_process
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import MAX_LEN, USED_VOCAB, VOCAB, llama, qwen2, random_model, save

NEW_TOKENS = 12


def rollout_config(tp: int = 1, **changes: Any) -> Rollout:
    """Temperature, top-p and top-k are on, unless they are changed."""
    lengths = {"max_new_tokens": NEW_TOKENS, "max_model_len": MAX_LEN}
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    return Rollout(devices="0", tp=tp, **{**lengths, **sampling, "kv_cache_mib": 16, **changes})


def requests(count: int = 6, *, first_seed: int = 0) -> list[SampleRequest]:
    """Two samples per prompt; the prompts fill a block of the prefix cache and share their beginning."""
    prompts = [Prompt(prompt_id=f"p{i}", token_ids=(*range(2, 42), 50 + i)) for i in range((count + 1) // 2)]
    return [
        SampleRequest(sample_id=f"s{i}", prompt=prompts[i // 2], seed=first_seed + 7 * i + 2**62) for i in range(count)
    ]


def sequences() -> list[list[int]]:
    """Random ids: the longest that the model allows, shorter, and the shortest with a log-probability."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(USED_VOCAB, (length,), generator=generator).tolist() for length in (MAX_LEN, 33, 2)]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """An engine's answers: sampled responses with their log-probabilities, and raw ones of given sequences."""

    chunk: RolloutChunk
    raw: Ragged


def ask(process: EngineProcess) -> Answers:
    _, (chunk,) = process.apply(in_process.generate, requests(), [len(requests())])
    return Answers(chunk=chunk, raw=process.call("logprobs", sequences()))


def start(
    process: EngineProcess,
    model_dir: Path,
    *,
    tp: int = 1,
    weights: Literal["sync", "files"] = "sync",
    device: str = "cpu",
    tokenizer: Path | None = None,
    kept_max: int | None = None,
    records_routes: bool = False,
    **changes: Any,
) -> None:
    """Starts an engine; the changes are of its rollout settings."""
    process.start(
        model_dir=model_dir,
        rollout=rollout_config(tp, **changes),
        options=EngineOptions(
            vocab_size=USED_VOCAB,
            device=device,
            tokenizer=None if tokenizer is None else str(tokenizer),
            weights=weights,
            kept_max=kept_max,
            records_routes=records_routes,
        ),
        engine_id=3,
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """HF directories by name. In ``greedy_padding`` the unused ids are by far the likeliest."""
    root = tmp_path_factory.mktemp("models")
    built = {
        "qwen2": random_model(qwen2(), 1),
        "qwen2_later": random_model(qwen2(), 2),
        "greedy_padding": random_model(qwen2(), 3),
        "llama": random_model(llama(), 5),
    }
    with torch.no_grad():
        head = built["greedy_padding"].lm_head.weight
        row = 100 * head[USED_VOCAB].sign()
        head[USED_VOCAB:VOCAB] = torch.stack(
            [row, -row, row, -row]
        )  # for any hidden state, one of them is the likeliest
    return {name: save(model, root / name) for name, model in built.items()}


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Hosts the engines without tensor parallelism."""
    process = EngineProcess(tmp_path_factory.mktemp("engine"))
    yield process
    process.close()


@pytest.fixture(scope="session")
def fresh(process: EngineProcess, models: Mapping[str, Path]) -> Mapping[str, Answers]:
    """The answers of engines that loaded the directories themselves, by model."""
    answers: dict[str, Answers] = {}
    for name in ("qwen2", "qwen2_later", "llama"):
        start(process, models[name], weights="files")
        answers[name] = ask(process)
    return answers
