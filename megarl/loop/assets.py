"""The model of a run, made where the configuration asks for a random one."""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.config import RunConfig
from megarl.config.schema import RandomModel


def model_directory(config: RunConfig, run_dir: Path) -> str:
    """The Hugging Face directory of the model; a random model is written into the run's directory first."""
    if config.model.random is None:
        assert config.model.path is not None
        return config.model.path
    directory = run_dir / "model"
    if not directory.exists():
        partial = run_dir / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        write_random_model(config.model.random, partial)
        partial.rename(directory)
    return str(directory.absolute())


def template_directory(config: RunConfig, model_dir: str) -> str:
    """The directory that the run's tokenizer is in, if there is one."""
    return config.model.tokenizer or model_dir


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
