"""The algorithms that a configuration names, and their arguments.

The keyword-only parameters of the function of a name are its options in a configuration, with their
bounds and defaults. A user's own function is named ``package.module:function``. Imports torch with
the first function only.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

from megarl.algos.signatures import Signature, signature_of
from megarl.plugins import resolve

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algos.policy_loss import LossTerms


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kind[F: Callable[..., Any]]:
    """The functions that one field chooses from.

    Args:
        module: module of ``megarl.algos``.
        functions: functions of the module, by their names in a configuration.
        presets: keyword arguments of the function that a name implies.
        arguments: positional arguments of every call.
        named: whether a function takes those of the arguments alone that its
            parameters name, by keyword.
        further: positional arguments of some calls, each with the field that adds it.
        keywords: keyword arguments of every call, besides the options.
        level: level of the user's functions, where the field takes two kinds of them; else None.
        custom: whether the field takes the user's functions.
    """

    title: str
    field: str
    module: str
    functions: Mapping[str, str]
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict[str, Mapping[str, Any]])
    arguments: tuple[str, ...]
    named: bool = False
    further: tuple[tuple[str, str], ...] = ()
    keywords: tuple[str, ...] = ()
    returns: str
    level: str | None = None
    custom: bool = True

    def __contains__(self, name: object) -> bool:
        return name in self.functions

    def signature(self, name: str) -> Signature:
        """The options of a function."""
        given = ("dtype", *self.keywords, *self.presets.get(name, ()))
        return signature_of(self.module, self.functions[name], given)

    def reads(self, name: str) -> frozenset[str]:
        """Returns the arguments that a function takes; none of a user's function that cannot be imported."""
        if not self.named:
            return frozenset(self.arguments)
        if name in self:
            return frozenset(self.signature(name).arguments)
        try:
            parameters = inspect.signature(resolve(name)).parameters
        except ValueError:  # the preflight reports it
            return frozenset()
        return frozenset(parameters).intersection(self.arguments)

    def function(self, name: str) -> F:
        """Imports a function, with its presets."""
        function = getattr(import_module(f"megarl.algos.{self.module}"), self.functions[name])
        return cast(F, partial(function, **self.presets[name]) if name in self.presets else function)


def bound[F: Callable[..., Any]](kind: Kind[F], name: str, options: Mapping[str, Any]) -> F:
    """Returns the named function, or the user's, with its options.

    Raises:
        ValueError: the user's function does not exist; see plugins.resolve.
    """
    function = kind.function(name) if name in kind else resolve(name)
    return cast(F, partial(function, **options))


def _same(*names: str) -> dict[str, str]:
    """The names of functions, by themselves."""
    return {name: name for name in names}


TOKEN_ADVANTAGES: Final[Kind[Callable[..., tuple[Tensor, Tensor]]]] = Kind(
    title="Advantages of tokens",
    field="algo.advantage",
    module="advantages",
    functions={**_same("gae", "vapo", "reinforce"), "reinforce_pp": "reinforce"},
    arguments=("rewards", "values", "response_mask"),
    returns="advantages and returns, [B, R] each, 0 off the mask",
    level="token",
)
GROUP_ADVANTAGES: Final[Kind[Callable[..., Tensor]]] = Kind(
    title="Advantages of samples",
    field="algo.advantage",
    module="group_advantages",
    functions={
        **_same("grpo", "dr_grpo"),
        "reinforce_pp_baseline": "dr_grpo",
        **_same("rloo", "rloo_std", "masked_rloo", "opo", "pass_at_k", "batch_std", "gpg", "remax", "gdpo", "none"),
    },
    arguments=("samples",),
    returns="[N] floats, in the order of the samples, 0 for those without a score",
    level="sample",
)
NORMALISERS: Final[Kind[Callable[..., Tensor]]] = Kind(
    title="Normalisation of advantages",
    field="algo.normalise.advantages",
    module="normalization",
    functions={"whiten": "whiten_advantages", **_same("grouped_tokens", "levels")},
    arguments=("advantages", "response_mask", "groups", "reduce"),
    returns="[B, R], 0 off the mask",
)
POLICY_LOSSES: Final[Kind[Callable[..., LossTerms]]] = Kind(
    title="Policy losses",
    field="algo.policy_loss",
    module="policy_loss",
    functions=_same(
        "ppo",
        "gspo",
        "cispo",
        "cispo_upper",
        "sapo",
        "gmpo",
        "reinforce",
        "sft",
    ),
    arguments=(
        "new_logprobs",
        "old_logprobs",
        "rollout_logprobs",
        "ref_logprobs",
        "advantages",
        "values",
        "entropy",
        "response_mask",
    ),
    named=True,
    returns="`LossTerms`, its values [B, R]",
)
VALUE_LOSSES: Final[Kind[Callable[..., LossTerms]]] = Kind(
    title="Value losses",
    field="algo.value_loss",
    module="value_loss",
    functions=_same("mse", "huber"),
    arguments=("values", "old_values", "returns"),
    returns="`LossTerms`, its values [B, R]",
)
AGGREGATIONS: Final[Kind[Callable[..., Tensor]]] = Kind(
    title="Aggregation",
    field="algo.aggregation",
    module="aggregation",
    functions=_same("token_mean", "token_sum", "sequence_mean", "sequence_sum", "sequence_sum_norm"),
    arguments=("response_mask",),
    keywords=("total_tokens", "total_sequences"),
    returns="weights [B, R] of the token losses, whose weighted sum over the optimizer step is the loss",
)
KL_ESTIMATORS: Final[Kind[Callable[..., Tensor]]] = Kind(
    title="KL estimates",
    field="algo.kl.estimator",
    module="kl",
    functions={**_same("k1", "k2", "k3"), "abs": "absolute", "k1+": "k1_plus", "k3+": "k3_plus", "full": "full"},
    arguments=("logprobs", "ref_logprobs"),
    further=(("importance", "algo.kl.importance"),),
    returns="[B, R] nats",
)
MISSING_ENDS: Final[Kind[Callable[..., Tensor]]] = Kind(
    title="Responses without an end",
    field="algo.scores.missing_end",
    module="reward_shaping",
    functions={name: f"{name}_missing_end" for name in ("replace", "subtract", "scale", "zero")},
    arguments=("scores", "finished"),
    returns="[N]",
    custom=False,
)
_LEVELS_AND_RULES = [(level, rule) for level in ("token", "sequence", "geometric") for rule in ("truncate", "mask")]
ROLLOUT_WEIGHTS: Final[Kind[Callable[..., Tensor]]] = Kind(
    title="Importance weights",
    field="algo.correction.weights",
    module="rollout_correction",
    functions={f"{level}_{rule}": "rollout_weights" for level, rule in _LEVELS_AND_RULES},
    presets={f"{level}_{rule}": {"level": level, "rule": rule} for level, rule in _LEVELS_AND_RULES},
    arguments=("old_logprobs", "rollout_logprobs", "response_mask", "reduce"),
    returns="[B, R], without a gradient, 0 off the mask",
)
FILTERS: Final[Kind[Callable[..., bool]]] = Kind(
    title="Filters of prompts",
    field="algo.filter",
    module="selection",
    functions=_same("nonzero_std", "open_range"),
    arguments=("scores",),
    returns="a bool, whether the prompt is kept",
)
SELECTIONS: Final[Kind[Callable[..., Tensor]]] = Kind(
    title="Selection of samples",
    field="algo.select.by",
    module="selection",
    functions={"local": "best_of_groups", "top": "best_fraction"},
    arguments=("scores", "groups", "discarded"),
    returns="[K] int64, the indices of the samples",
    custom=False,
)
CURRICULA: Final[Kind[Callable[..., Any]]] = Kind(
    title="Curricula",
    field="data.curriculum",
    module="curriculum",
    functions=_same("pools", "learnability", "thompson"),
    arguments=("history", "count", "random"),
    returns="[count] int64, different indices of prompts",
)
PREFERENCE_LOSSES: Final[Kind[Callable[..., LossTerms]]] = Kind(
    title="Losses of reward models",
    field="reward.loss",
    module="preference_loss",
    functions=_same("pairwise", "best_of_n", "span"),
    arguments=("chosen", "rejected"),
    returns="`LossTerms`, its values [P]",
)
INPUTS_OF_PAIRS: Final = (
    "chosen",
    "rejected",
    "ref_chosen",
    "ref_rejected",
    "chosen_tokens",
    "rejected_tokens",
)
INPUTS_OF_RESPONSES: Final = ("logprobs", "ref_logprobs", "tokens", "desirable", "kl")
INPUTS_OF_REFERENCES: Final = ("ref_chosen", "ref_rejected", "ref_logprobs", "kl")
DIRECT_LOSSES: Final[Kind[Callable[..., LossTerms]]] = Kind(
    title="Losses of preferences",
    field="preference.loss",
    module="direct_preference",
    functions=_same("dpo", "hinge", "ipo", "simpo", "orpo", "cpo", "kto"),
    arguments=(*INPUTS_OF_PAIRS, *INPUTS_OF_RESPONSES),
    named=True,
    returns="`LossTerms`, its values [P]",
)

KINDS: Final[tuple[Kind[Any], ...]] = (
    TOKEN_ADVANTAGES,
    GROUP_ADVANTAGES,
    NORMALISERS,
    POLICY_LOSSES,
    VALUE_LOSSES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    MISSING_ENDS,
    ROLLOUT_WEIGHTS,
    FILTERS,
    SELECTIONS,
    CURRICULA,
    PREFERENCE_LOSSES,
    DIRECT_LOSSES,
)
"""In the order of docs/algorithms.md."""
