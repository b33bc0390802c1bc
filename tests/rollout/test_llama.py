"""The other family: no biases, and an output layer that is the embedding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.rollout.conftest import Answers, ask, sequences, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.oracles import assert_close, assert_same, hf_raw_logprobs
from tests.rollout.syncing import sync

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_tied_embeddings_are_synced(
    process: EngineProcess, models: Mapping[str, Path], fresh: Mapping[str, Answers]
) -> None:
    start(process, models["llama"])
    sync(process, models["llama"], 1)
    answers = ask(process)
    assert_same(answers, fresh["llama"])
    assert_close(answers.raw, hf_raw_logprobs(models["llama"], sequences()), 1e-4, "vLLM against transformers")
