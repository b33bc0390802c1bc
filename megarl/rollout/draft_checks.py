"""A mend of how vLLM checks drafts on a CPU; it runs in vLLM's workers."""

from __future__ import annotations

from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.sample import rejection_sampler


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
