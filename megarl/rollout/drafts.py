"""Drafts of the tokens of a response: what they set in vLLM, and how many are accepted.

A step of the engine scores a token and the drafts after it, and accepts those that are as likely as
rejection sampling requires: what is sampled keeps its distribution (Leviathan et al., 2023,
https://arxiv.org/abs/2211.17192).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import CompletionOutput

_LONGEST = 4
"""The most tokens that are looked up; what followed the longest of their ends is proposed."""
_SHORTEST = 2


def draft_settings(count: int) -> dict[str, Any]:
    """Returns settings of vLLM's for this many drafts in a step; none for 0.

    Batches under way at once would let a request draft from tokens that it does not have yet.
    """
    if count == 0:
        return {}
    lookup = {"prompt_lookup_min": _SHORTEST, "prompt_lookup_max": _LONGEST}
    return {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": count, **lookup},
        "per_request_spec_decode_metrics": "summary",
        "async_scheduling": False,
    }


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
        return {
            "rollout/draft_acceptance": self.accepted / max(self.drafted, 1),
            "rollout/draft_share": self.accepted / max(self.sampled, 1),
        }


def draft_counts(completion: CompletionOutput) -> DraftCounts:
    """Returns the counts of a response."""
    found = completion.spec_decode_metrics
    sampled = len(completion.token_ids)
    if found is None:
        return DraftCounts(sampled=sampled)
    accepted = 0
    for tokens, steps in enumerate(found.histogram):
        accepted += tokens * steps
    return DraftCounts(drafted=found.num_draft_tokens, accepted=accepted, sampled=sampled)
