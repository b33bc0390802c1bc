"""The model and the prompts of a run, made where the configuration asks for random ones."""

from __future__ import annotations

from pathlib import Path

from megarl.config import ConfigError, Problem, RunConfig
from megarl.config.schema import RandomModel
from megarl.data.prompts import random_prompts, read_prompts
from megarl.types import Prompt


def model_directory(config: RunConfig, run_dir: Path) -> str:
    """The Hugging Face directory of the model; a random model is written into the run's directory first."""
    if config.model.random is None:
        assert config.model.path is not None
        return config.model.path
    directory = run_dir / "model"
    write_random_model(config.model.random, directory)
    return str(directory.absolute())


def write_random_model(model: RandomModel, directory: Path) -> None:
    """Writes config.json and safetensors of a randomly initialised model, without a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    fields = dict(model.config)
    hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        AutoModelForCausalLM.from_config(hf_config, dtype=hf_config.dtype).save_pretrained(directory)


def prompts_of(config: RunConfig, vocab_size: int) -> list[Prompt]:
    """The prompts of the run.

    Args:
        vocab_size: token ids lie below it.

    Raises:
        ConfigError: the file cannot be used; the message has the line and the reason.
    """
    path = config.data.prompts
    if path is not None:
        try:
            return read_prompts(path, vocab_size)
        except (OSError, ValueError) as error:
            fix = "correct the file, or name another one"
            raise ConfigError([Problem(field="data.prompts", value=path, rule=str(error), fix=fix)]) from None
    made = config.data.random
    assert made is not None
    return random_prompts(
        count=made.count,
        min_tokens=made.min_tokens,
        max_tokens=made.max_tokens,
        vocab_size=vocab_size,
        seed=made.seed,
    )
