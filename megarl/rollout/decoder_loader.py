"""vLLM's loader of files that have more than the decoder, such as a vision tower. vLLM's processes import this file."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from megarl.models import model_spec
from megarl.rollout.vllm_environment import DECODER_FORMAT
from megarl.weights.hf_files import matches, read_config


@register_model_loader(DECODER_FORMAT)
class DecoderLoader(DefaultModelLoader):
    """vLLM's own, without tensors of other parts of the model, for which the decoder's class has no place."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(
        self,
        model_config: ModelConfig,
        model: nn.Module,
    ) -> Generator[tuple[str, torch.Tensor], Any, None]:
        untrained = model_spec(read_config(model_config.model)).untrained
        for name, tensor in super().get_all_weights(model_config, model):
            if not matches(name, untrained):
                yield name, tensor
