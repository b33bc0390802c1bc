"""Is the recorded log-probability that of the trainers' distribution?

The trainers' is the softmax of the logits by the temperature over the ids in use (tests/megatron/test_parity.py). vLLM
is held to it by transformers, for all that could get into its distribution: what a configuration may set in stage ppo,
the model's directory, other requests, and what else vLLM can be asked for.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.data.prompts import greedy_requests
from megarl.types import RolloutChunk, SampleRequest
from tests.rollout import in_process
from tests.rollout.conftest import NEW_TOKENS, requests, rollout_config, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import END, USED_VOCAB, save_tokenizer, text_of
from tests.rollout.oracles import hf_logits

pytestmark = [pytest.mark.e2e]

PPO: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": None}
STOP = text_of([30, 31, 32])
ADVICE = {
    "do_sample": True,
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.2,
    "repetition_penalty": 1.8,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [5, 6, 7],
    "min_new_tokens": 9,
}
"""Of a model's generation_config.json."""


@dataclasses.dataclass(frozen=True)
class Engine:
    process: EngineProcess
    model_dir: Path
    frequent: int
    """An end token of the model that is likely."""

    def sample(self, asked: list[SampleRequest], **changes: Any) -> RolloutChunk:
        settings = rollout_config(**{**PPO, "stop": (STOP,), **changes})
        return self.process.apply(in_process.generate_with, settings, asked)

    def expected(self, chunk: RolloutChunk, row: int, temperature: float) -> np.ndarray:
        """The log-probabilities of a response's tokens by transformers, over the ids in use."""
        prompt, response = chunk.prompt_ids[row], chunk.response_ids[row]
        (logits,) = hf_logits(self.model_dir, [[*prompt, *response]])
        logprobs = (logits[len(prompt) - 1 : -1, :USED_VOCAB].double() / temperature).log_softmax(-1)
        return logprobs.gather(1, torch.tensor(response, dtype=torch.int64).unsqueeze(1)).squeeze(1).numpy()

    def assert_trainers(self, chunk: RolloutChunk, temperature: float) -> None:
        tolerance = max(1e-4, 1e-5 / temperature)  # rounding of logits, which the temperature divides too
        for row, recorded in enumerate(chunk.rollout_logprobs):
            np.testing.assert_allclose(recorded, self.expected(chunk, row, temperature), rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def engine(process: EngineProcess, models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """One vLLM for all cases; its model's generation_config.json recommends another distribution."""
    root = tmp_path_factory.mktemp("sampling")
    model_dir = root / "model"
    shutil.copytree(models["qwen2"], model_dir)
    prompts = [list(request.prompt.token_ids) for request in requests()]
    likely = torch.stack([logits[-1, :USED_VOCAB].softmax(-1) for logits in hf_logits(model_dir, prompts)]).mean(0)
    frequent = int(likely.argmax())
    advice = json.dumps({**ADVICE, "eos_token_id": [END, frequent]})
    (model_dir / "generation_config.json").write_text(advice)
    start(process, model_dir, weights="files", tokenizer=save_tokenizer(root / "tokenizer"), **PPO, stop=(STOP,))
    return Engine(process, model_dir, frequent)


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 2.0])
def test_recorded_log_probabilities_are_those_of_the_trainers(engine: Engine, temperature: float) -> None:
    """At the bounds of rollout.temperature too, which vLLM else would change by itself."""
    chunk = engine.sample(requests(24), temperature=temperature)
    engine.assert_trainers(chunk, temperature)
    assert any(chunk.finished) or temperature == 0.01


def test_ignored_end_tokens_are_sampled_like_others(engine: Engine) -> None:
    chunk = engine.sample(requests(24), ignore_eos=True)
    assert chunk.response_ids.lengths.tolist() == [NEW_TOKENS] * 24
    assert not any(chunk.finished)
    assert any(engine.frequent in response[:-1] for response in chunk.response_ids)
    engine.assert_trainers(chunk, 1.0)


def test_requests_of_other_distributions_change_only_themselves(engine: Engine) -> None:
    """Greedy baselines and evaluations in the same batches, whose log-probabilities no loss reads."""
    sampled = requests(12)
    prompts = [request.prompt for request in sampled[::4]]
    cold = [dataclasses.replace(request, sample_id=f"cold {request.sample_id}", temperature=0.5) for request in sampled]
    chunk = engine.sample([*greedy_requests(prompts, step=1), *sampled, *cold])
    temperatures = [1.0] * (len(prompts) + len(sampled)) + [0.5] * len(cold)
    for row, temperature in enumerate(temperatures):
        np.testing.assert_allclose(
            chunk.rollout_logprobs[row], engine.expected(chunk, row, temperature), rtol=0, atol=1e-4
        )


def test_samples_are_drawn_from_the_distribution_that_is_recorded(engine: Engine) -> None:
    """Of 4,000 seeds; the sum of squares (Pearson's) is within four deviations of its mean."""
    count, temperature = 4000, 0.7
    request = dataclasses.replace(requests()[0], max_new_tokens=1)
    asked = [dataclasses.replace(request, sample_id=str(i), seed=1000 + i) for i in range(count)]
    chunk = engine.sample(asked, temperature=temperature)
    (logits,) = hf_logits(engine.model_dir, [request.prompt.token_ids])
    expected = count * (logits[-1, :USED_VOCAB].double() / temperature).softmax(-1).numpy()
    found = np.bincount(chunk.response_ids.values, minlength=USED_VOCAB)
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    found = np.append(found[~rare], found[rare].sum())
    degrees = len(expected) - 1
    assert degrees > 20
    assert ((found - expected) ** 2 / expected).sum() < degrees + 4 * (2 * degrees) ** 0.5


def test_vllm_is_asked_for_nothing_else_that_changes_the_distribution(engine: Engine) -> None:
    """By all that this version knows: what a later one adds belongs into one of the tables."""
    prompt = requests()[0].prompt
    request = SampleRequest(sample_id="a", prompt=prompt, seed=2**64 - 1, temperature=0.01, max_new_tokens=3)
    asked, default = engine.process.apply(in_process.request_parameters, request)
    held = {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "seed",
    }
    form = {
        "logprobs",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "output_kind",
        "output_text_buffer_length",
    }
    derived = {"_all_stop_token_ids"}  # of stop_token_ids
    neutral = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "watermarking": None,
        "structured_outputs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": [],
        "_bad_words_token_ids": None,
        "extra_args": None,
        "thinking_token_budget": None,
        "repetition_detection": None,
        "trace_decode_token_ids": None,
    }
    output = {
        *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids"),
        *("spaces_between_special_tokens", "include_stop_str_in_output", "stream_interval", "skip_clone"),
        *("_eos_token_id", "_watermarking_skipped", "skip_reading_prefix_cache", "routed_experts_prompt_start"),
    }
    assert asked.keys() == held | form | derived | neutral.keys() | output
    assert {name: asked[name] for name in neutral} == neutral
    assert {name: asked[name] for name in output} == {name: default[name] for name in output}
    assert [asked[name] for name in ("temperature", "top_p", "top_k", "min_p", "min_tokens")] == [0.01, 1.0, 0, 0.0, 0]
    colder, _ = engine.process.apply(in_process.request_parameters, dataclasses.replace(request, temperature=0.005))
    assert colder["temperature"] == 0.01, "the reason for the bound of rollout.temperature"
    assert {field.name for field in dataclasses.fields(SampleRequest)} == {
        *("sample_id", "prompt", "seed", "temperature", "max_new_tokens")
    }, "nothing else of a request, of a row or of an environment reaches vLLM"


def test_no_setting_of_vllm_changes_the_distribution(engine: Engine) -> None:
    assert engine.process.apply(in_process.sampling_configuration) == {
        "generation_config": "vllm",  # not the model's
        "override_generation_config": {},
        "defaults": {},
        "logits_processors": None,
        "logprobs_mode": "processed_logprobs",  # by the temperature
        "enable_trace_replay": False,
        "speculative_config": None,
        "watermark_config": None,
        "diffusion_config": None,
    }
