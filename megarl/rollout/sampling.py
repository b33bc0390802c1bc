"""What is asked of vLLM for a sampled response and for a scored sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import SamplingParams

    from megarl.config.schema import Rollout as RolloutConfig
    from megarl.types import SampleRequest

_SEED_MASK = 2**63 - 1


def generation_params(rollout: RolloutConfig, request: SampleRequest, stop_token_ids: Sequence[int]) -> SamplingParams:
    """Samples one response and returns the log-probability of each of its tokens.

    They are of the distribution that was sampled from: after temperature, top-p, top-k and the mask that keeps end
    tokens out of the first ``min_new_tokens``, renormalised. Trainers divide by the temperature alone (the full
    softmax, as for the ratios of PPO): where one of the others is on, the two differ by what it cuts off. Those of a
    greedy response are at temperature 1, and vLLM lets top-p and top-k rest.

    Args:
        request: of its seed vLLM draws from the lower 63 bits, since it keeps seeds as signed numbers and reads -1 as
            no seed.
        stop_token_ids: ids that end a response; the response includes the one that it ended with.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=rollout.temperature if request.temperature is None else request.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k or 0,
        seed=request.seed & _SEED_MASK,
        min_tokens=rollout.min_new_tokens,
        max_tokens=rollout.max_new_tokens,
        stop=list(rollout.stop),
        skip_special_tokens=False,  # a stop text may be that of a special token
        detokenize=bool(rollout.stop),
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,  # nothing but stop_token_ids ends a response: a tokenizer may have an end token of its own
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> SamplingParams:
    """Returns the raw log-probabilities of a prompt's tokens; vLLM generates one token at the least.

    With ``prompt_logprobs`` vLLM reads nothing from the prefix cache by itself; it is said again because a stale
    cache would go unnoticed.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        skip_reading_prefix_cache=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
