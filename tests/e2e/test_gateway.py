"""A run whose conversations are held by harnesses: OpenAI's client with a tool, and the example."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from examples.gateway.prepare import prepare
from examples.sort_letters.checkpoint import CHARACTERS
from tests.conversations.gateways import TEMPLATE, call_text
from tests.e2e.clients import TALKS, TURNS
from tests.e2e.runs import lines, run_to_end
from tests.e2e.test_environments import check_turns

pytestmark = [pytest.mark.e2e]

CALLS = [call_text("add", a=number, b=1) for number in range(64)]
THOUGHTS = "<think>\nlet me add\n</think>\n\n"


def write_talker(directory: Path) -> None:
    """Writes a random model of which about every third token is an end, and every third a call of a tool.

    Calls and thoughts are tokens of their own, which no text is encoded to: who encodes a turn again gets other ids.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    phrases = [text.replace(" ", "Ġ").replace("\n", "Ċ") for text in (*CALLS, THOUGHTS)]
    tokens = ["<s>", "</s>", "<unk>", "Ċ", *CHARACTERS, *phrases]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    logits = torch.zeros(len(tokenizer))
    logits[1], logits[-len(phrases) : -1], logits[-1] = 4.5, 0.5, 2.0
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        for layer in model.model.layers:
            layer.self_attn.v_proj.bias.fill_(1.0)  # hidden states then have a common part
        hidden = model.model(torch.arange(len(tokenizer))[None]).last_hidden_state.mean((0, 1))
        model.lm_head.weight += logits[:, None] * hidden / hidden.square().sum()
        model.save_pretrained(directory)


def test_a_run_trains_on_the_conversations_of_harnesses(tmp_path: Path) -> None:
    """Each turn is trained as the engines have recorded it, scores are what harnesses have posted; nothing is left."""
    prepare(tmp_path, steps=1)
    write_talker(tmp_path / "model")
    tasks = "".join(json.dumps({"number": number}) + "\n" for number in range(TALKS + 1))
    (tmp_path / "tasks.jsonl").write_text(tasks)
    written = {"name": "tests.e2e.test_environments:written", "args": {"file": str(tmp_path / "trained.jsonl")}}
    overrides = (
        f"environment.args.command={json.dumps([sys.executable, '-m', 'tests.e2e.clients'])}",
        "environment.history=sampled",
        "environment.concurrency=3",
        f"data.prompts_per_step={TALKS + 1}",
        "rollout.max_new_tokens=64",
        "rollout.max_model_len=2048",
        "rollout.kv_cache_mib=64",
        f"rollout.record={tmp_path / 'sampled'}",
        f"reward.functions={json.dumps([written])}",
        "tracking.samples=all",
    )
    finished = run_to_end(["train", str(tmp_path / "run.yaml"), *overrides], writes_model=True)
    finished.assert_succeeded()
    (step,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert step["rollout/logprob_gap"] < 1e-4, "trainer and engines disagree"
    _, *trained = lines(tmp_path / "trained.jsonl")  # without the trial call
    turns = check_turns(trained, tmp_path / "sampled")
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == len(turns) == 2 * (TALKS + 1)
    for sample in samples:
        capitals = sum(letter.isupper() for letter in sample["response"])
        own = sample["fields"]["number"] == TALKS
        assert sample["scores"]["environment"] == (capitals / 4 if own else TURNS)
        assert own or sample["text"].count("<s>assistant\n") == TURNS
        assert ('"name": "add"' in sample["text"].partition("<s>user")[0]) != own, "the tool is offered"
    assert any("<s>tool\n" in sample["text"] for sample in samples), "no tool was called"
