"""The checkpoint that the demo starts from, as others load it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sort_letters.checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "model"
    write_checkpoint(directory, seed=1)
    return directory


def test_characters_are_tokens(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "down kdxbq: THE 2 Colons!~"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert len(set(ids)) == len(set(text))
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [tokenizer.bos_token_id, *ids]
    assert tokenizer.decode([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_special_tokens_agree_with_the_model(directory: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    assert [getattr(model.config, name) for name in names] == [getattr(tokenizer, name) for name in names] == [0, 1, 2]
    assert model.config.vocab_size == len(tokenizer) == 99


def test_the_checkpoint_is_determined_by_the_seed(directory: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    write_checkpoint(tmp_path / "same", seed=1)
    write_checkpoint(tmp_path / "other", seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    weights, same, other = (
        (place / "model.safetensors").read_bytes() for place in (directory, tmp_path / "same", tmp_path / "other")
    )
    assert weights == same != other
