"""Every family, synced from Megatron's layouts into live engines: equal to engines that loaded the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.types import Layout
from tests.rollout.conftest import ask, sequences, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import FAMILIES, ONLY_BFLOAT16, family, random_model, save
from tests.rollout.oracles import assert_close, assert_same, hf_raw_logprobs
from tests.rollout.syncing import sync

pytestmark = [pytest.mark.e2e]

DENSE = Layout(tp=2, pp=2)
MIXTURES = {"mixtral": Layout(pp=2, dp=3, ep=3), "qwen3_moe": Layout(tp=1, pp=2, dp=2, ep=2)}
TELLING = {("gpt2", 1), ("qwen3", 1), ("qwen3_moe", 2)}
"""Of the product, what the default suite runs: learned positions and LayerNorms, norms of heads, experts."""
BFLOAT16_NOISE = 0.3
"""How far transformers in bfloat16 is from itself in float32: 0.29 and 0.20 with the two seeds' weights."""

EVERY = [
    pytest.param(kind, tp, id=f"{kind}-tp{tp}", marks=() if (kind, tp) in TELLING else pytest.mark.matrix)
    for kind in FAMILIES
    for tp in (1, 2)
]


@pytest.mark.parametrize(("kind", "tp"), EVERY)
def test_a_synced_engine_equals_one_that_loaded_the_files(
    process: EngineProcess, tmp_path: Path, kind: str, tp: int
) -> None:
    """An engine of the first files takes other weights, and the first again, as Megatron's ranks hold them."""
    dtype, tolerance = ("bfloat16", BFLOAT16_NOISE) if kind in ONLY_BFLOAT16 else ("float32", 1e-4)
    first, other = (save(random_model(family(kind, dtype=dtype), seed), tmp_path / str(seed)) for seed in (1, 2))
    layout = MIXTURES.get(kind, DENSE)
    start(process, first, weights="files")
    expected = ask(process)
    if tp > 1:
        start(process, other, tp=tp)
    sync(process, other, 1, layout)
    moved = ask(process)
    assert_close(moved.raw, hf_raw_logprobs(other, sequences()), tolerance, "vLLM against transformers")
    sync(process, first, 2, layout)
    if tp == 1:
        assert_same(ask(process), expected)
    elif kind in ONLY_BFLOAT16:  # which samples other tokens as soon as sums round elsewhere
        assert_close(ask(process).raw, expected.raw, tolerance, "TP 2 against TP 1")
    else:
        assert_same(ask(process), expected, atol=1e-5)  # the sums of a split matrix round elsewhere
