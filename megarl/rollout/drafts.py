"""Drafts of the tokens of a response: what they set in vLLM, and how many are accepted.

A step of the engine scores a token and the drafts after it, and accepts those that are as likely as
rejection sampling requires: what is sampled keeps its distribution (Leviathan et al., 2023,
https://arxiv.org/abs/2211.17192).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm import CompletionOutput

    from megarl.config.schema import Rollout

_LONGEST = 4
"""The most tokens that are looked up; what followed the longest of their ends is proposed."""
_SHORTEST = 2
LOAD_FORMAT: Final = "megarl_drafts"
"""The name for vLLM of `draft_checks.DraftLoader`."""


def draft_settings(rollout: Rollout, device: str, *, loads: bool) -> dict[str, Any]:
    """Returns settings of vLLM's for drafts; none without them.

    Where a prompt but for its last token is cached, vLLM (0.32) gives its first step drafts of -1,
    unless the number of drafts follows a schedule. On a CPU they take random numbers, so that
    samples would depend on the cache, and read memory beside the probabilities.

    Args:
        loads: whether the engine loads its weights from files; else only a draft model does.
    """
    count = rollout.speculative
    if count == 0:
        return {}
    drafts: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": count}
    settings = {"speculative_config": drafts, "per_request_spec_decode_metrics": "summary"}
    if device == "cpu":
        drafts["num_speculative_tokens_per_batch_size"] = [(1, 1, count)]  # and for larger ones
    if rollout.draft_model is None:
        drafts |= {"prompt_lookup_min": _SHORTEST, "prompt_lookup_max": _LONGEST}
        return settings
    drafts |= {"method": "draft_model", "model": rollout.draft_model}
    drafts["draft_tensor_parallel_size"] = rollout.tp
    if not loads:
        settings["load_format"] = LOAD_FORMAT
        settings["model_loader_extra_config"] = {"loaded": rollout.draft_model}
    return settings


@dataclass(kw_only=True)
class DraftCounts:
    """Numbers of tokens: drafted, accepted of these, and sampled in all."""

    drafted: int = 0
    accepted: int = 0
    sampled: int = 0

    def add(self, other: DraftCounts) -> None:
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.sampled += other.sampled

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of which there is anything to divide by."""
        metrics: dict[str, float] = {}
        if self.drafted:
            metrics["rollout/draft_acceptance"] = self.accepted / self.drafted
        if self.sampled:
            metrics["rollout/draft_share"] = self.accepted / self.sampled
        return metrics


def draft_counts(completion: CompletionOutput) -> DraftCounts:
    """Returns the counts of a response.

    vLLM also counts drafts that it accepts after the end; the first token is none.
    """
    found = completion.spec_decode_metrics
    sampled = len(completion.token_ids)
    if found is None:
        return DraftCounts(sampled=sampled)
    accepted = 0
    for tokens, steps in enumerate(found.histogram):
        accepted += tokens * steps
    return DraftCounts(drafted=found.num_draft_tokens, accepted=min(accepted, sampled - 1), sampled=sampled)
