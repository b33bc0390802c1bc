"""How vLLM's workers load a draft model, and a mend of how they check drafts on a CPU."""

from __future__ import annotations

from torch import Tensor, nn
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.v1.sample import rejection_sampler

from megarl.rollout.drafts import LOAD_FORMAT


@register_model_loader(LOAD_FORMAT)
class DraftLoader(BaseModelLoader):
    """Loads one model from files, the draft model; any other gets its weights by a sync.

    vLLM (0.32) loads a draft model as its target, whatever `draft_load_config` says.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        """Does nothing: both are directories."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Loads the model if `model_loader_extra_config` has its directory as `loaded`."""
        is_draft = model_config.model == self.load_config.model_loader_extra_config["loaded"]
        loader = DefaultModelLoader if is_draft else DummyModelLoader
        loader(LoadConfig()).load_weights(model, model_config)


def mend_draft_checks(config: VllmConfig) -> None:
    """Gives every draft the temperature and top-p of its request.

    vLLM's kernel for a CPU copies numbers of type int64 alone: those of other types go into a copy,
    which nobody reads (utils/cpu_triton_utils.py, _expand_kernel_impl, 0.32).
    """
    if config.speculative_config is not None and config.device_config.device_type == "cpu":
        rejection_sampler.expand_batch_to_tokens = expand_to_drafts


def expand_to_drafts(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Returns a value for each draft, [T], from one for each request; its names are vLLM's.

    Args:
        x: [N], values of the requests.
        cu_num_tokens: [N], sums of the numbers of drafts up to each request.
        num_tokens: T.
        replace_from, replace_to: a value that is replaced, and by which one.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
