"""The model that the demo starts from: a small random Qwen2 with a tokenizer whose tokens are characters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = ("Ġ", *map(chr, range(ord("!"), ord("~") + 1)))
"""The printable characters of ASCII, each a token; Qwen2's tokenizers write a space as Ġ."""
MAX_POSITIONS = 64


def tokenizer() -> Qwen2Tokenizer:
    """Qwen2's tokenizer without merges, in which every character stays a token; <bos> comes before a text."""
    from tokenizers.processors import TemplateProcessing
    from transformers import Qwen2Tokenizer

    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    pad, bos, eos, unknown = SPECIAL_TOKENS
    characters = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        model_max_length=MAX_POSITIONS,
    )
    characters.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
    )
    return characters


def write_checkpoint(directory: Path, seed: int) -> None:
    """Writes a Hugging Face directory: config.json, safetensors, tokenizer.

    Args:
        directory: where to; it is made.
        seed: of the weights.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokens = tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        bos_token_id=SPECIAL_TOKENS.index("<bos>"),
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(directory)
    tokens.save_pretrained(directory)
