"""Rule-based rewards: what a function sees of a response, the built-in ones, and how users name their own."""

from megarl.rewards.answer import Answer
from megarl.rewards.checks import check_fields, check_functions
from megarl.rewards.registry import RULES, labels
from megarl.rewards.scorer import Failures, RuleScorer, Scores, Unscored

__all__ = [
    "RULES",
    "Answer",
    "Failures",
    "RuleScorer",
    "Scores",
    "Unscored",
    "check_fields",
    "check_functions",
    "labels",
]
