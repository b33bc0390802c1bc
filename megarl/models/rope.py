"""Rotary embeddings: what a config states of them, read without torch; ``megatron.rotary`` computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from megarl.models.hf_config import HFConfigReader

_ORIGINAL = "original_max_position_embeddings"
_EVERY_TYPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": (
        "factor",
        _ORIGINAL,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("short_factor", "long_factor", _ORIGINAL),
}
"""The fields of each type that transformers and vLLM understand alike, apart from those of every type."""
_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotary embeddings of a model.

    Args:
        kind: HF's ``rope_type``.
        share: share of a head's elements that are rotated, which are its first ones.
        parameters: HF's ``rope_parameters``, complete.
        original: longest sequence before the context was extended; None where the type has none.
        long: whether longrope takes its long factors.
    """

    kind: str
    base: float
    share: float
    parameters: Mapping[str, Any]
    original: int | None
    long: bool = False


_BASES: Mapping[str, str] = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
"""Fields with the base of each type of layer, where its parameters have none."""


def read_ropes(read: HFConfigReader, head_dim: int, positions: int) -> tuple[Rope, Rope]:
    """Reads those of full attention and of layers with windows, which ``rope_parameters`` has by type of layer.

    Where it is absent, ``rope_scaling`` is that of full attention.
    """
    found: Any = read.get("rope_parameters")
    scaling: Any = read.get("rope_scaling")
    if isinstance(scaling, Mapping) and "rope_type" not in scaling and scaling:
        read.problem(
            "rope_scaling", cast(object, scaling), "has no rope_type, which transformers reads here, and not type"
        )
    by_type: Mapping[str, Any] = {"full_attention": scaling}
    if isinstance(found, Mapping) and set(cast(Mapping[str, Any], found)) <= set(_BASES):
        by_type = cast(Mapping[str, Any], found)
        if scaling not in (None, {}):
            read.problem("rope_scaling", cast(object, scaling), "is stated beside rope_parameters; keep one of them")
    elif found is not None:
        read.problem("rope_parameters", cast(object, found), f"is not by type of layer, {', '.join(_BASES)}")
    ropes: list[Rope] = []
    for layer_type, base in _BASES.items():
        stated: Any = by_type.get(layer_type) or {}
        if not isinstance(stated, Mapping):
            read.problem("rope_parameters", stated, "does not hold keys and values")
            stated = {}
        parameters = cast(Mapping[str, Any], stated)
        theta = read.as_number(base, parameters.get("rope_theta", read.get(base)))
        ropes.append(_read_parameters(read, parameters, theta, head_dim, positions))
    return ropes[0], ropes[1]


def read_rope(read: HFConfigReader, head_dim: int, positions: int) -> Rope:
    """Reads ``rope_parameters``, or ``rope_scaling`` and ``rope_theta``, and adds problems to the reader."""
    found: Any = read.get("rope_parameters") or read.get("rope_scaling") or {}
    if read.get("rope_scaling") not in (None, {}, found):
        read.refuse("rope_scaling", "is not what rope_parameters states; keep one of them")
    if not isinstance(found, Mapping):
        read.problem("rope_parameters", found, "does not hold keys and values")
        found = {}
    stated = cast(Mapping[str, Any], found)
    base: Any = stated.get("rope_theta") or read.get("rope_theta")
    if base is None:
        read.problems.append("rope_theta: missing, and engines differ in what they assume; state it")
        base = 1.0
    else:
        base = read.as_number("rope_theta", base)
    return _read_parameters(read, stated, base, head_dim, positions)


def _read_parameters(
    read: HFConfigReader, stated: Mapping[str, Any], base: float, head_dim: int, positions: int
) -> Rope:
    """Reads all but the base."""
    kind: Any = stated.get("rope_type") or stated.get("type") or "default"
    if not isinstance(kind, str) or kind not in _FIELDS:
        read.problem("rope_type", kind, f"is not supported; supported are {', '.join(_FIELDS)}")
        kind = "default"
    else:
        _refuse_other_fields(read, kind, stated)
    supported = read.family.rope_types
    if supported and kind not in supported:
        read.problem("rope_type", kind, f"is not supported; supported are {', '.join(supported)}")
    share = _share(read, stated, head_dim)
    parameters = {name: stated[name] for name in _FIELDS[kind] if stated.get(name) is not None}
    original: int | None = None
    if _ORIGINAL in _FIELDS[kind]:
        original = _read_original(read, stated, positions)
        parameters[_ORIGINAL] = original
        _check_type(read, kind, parameters, positions, width=int(head_dim * share))
    elif kind == "linear":
        _at_least_one(read, parameters.get("factor"))
    parameters |= {"rope_type": kind, "rope_theta": base, "partial_rotary_factor": share}
    return Rope(kind=kind, base=base, share=share, parameters=parameters, original=original)


def _read_original(read: HFConfigReader, stated: Mapping[str, Any], positions: int) -> int:
    """Reads the longest sequence before the context was extended, which may stand in the config itself.

    Where transformers' class does not declare it there, its models read it, but vLLM does not.
    """
    outside: Any = read.get(_ORIGINAL)
    inside: Any = stated.get(_ORIGINAL, positions)
    if _ORIGINAL in read.family.defaults:
        return read.as_count(_ORIGINAL, outside)
    if outside not in (None, inside):
        read.problem(_ORIGINAL, outside, f"is not {inside}, that of rope_parameters, which vLLM takes")
    return read.as_count(_ORIGINAL, inside)


def _refuse_other_fields(read: HFConfigReader, kind: str, stated: Mapping[str, Any]) -> None:
    """Adds problems for fields that one of the engines would take for something, or ignore."""
    for name, value in stated.items():
        known = (*_EVERY_TYPE, *_FIELDS[kind], *read.family.unused_rope)
        if name == "truncate" and not isinstance(value, bool):
            read.problem("truncate", value, "is neither true nor false")
        if name not in known and value is not None:
            read.problem(f"rope_parameters.{name}", value, f"is not supported with rope_type {kind}")


def _share(read: HFConfigReader, stated: Mapping[str, Any], head_dim: int) -> float:
    """Reads the share of a head's elements that are rotated."""
    share: Any = stated.get("partial_rotary_factor")
    if share is None:
        share = read.get("partial_rotary_factor")
    if share is None:
        share = 1.0
    name = "partial_rotary_factor"
    if share != 1.0 and not read.family.partial_rotary:
        read.problem(name, share, f"is not supported: transformers' {read.family.model_type} rotates whole heads")
    elif type(share) not in (int, float) or not 0 < share <= 1:
        read.problem(name, share, "is not a number above 0 and of at most 1")
    elif int(head_dim * share) % 2 or int(head_dim * share) == 0:
        read.problem(name, share, f"rotates {int(head_dim * share)} of {head_dim} elements, which is no even number")
    else:
        return float(share)
    return 1.0


def _check_type(read: HFConfigReader, kind: str, parameters: Mapping[str, Any], positions: int, *, width: int) -> None:
    original = parameters[_ORIGINAL]
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            factors: Any = parameters.get(name)
            if not _are_factors(factors, width // 2):
                rule = f"is not a list of {width // 2} numbers above 0, one for each pair of rotated elements"
                read.problem(name, factors, rule)
        if original < 2:
            read.problem(_ORIGINAL, original, "is below 2")
        return
    factor = _at_least_one(read, parameters.get("factor"))
    if kind == "llama3":
        low = read.as_number("low_freq_factor", parameters.get("low_freq_factor"))
        high = read.as_number("high_freq_factor", parameters.get("high_freq_factor"))
        if not low < high:
            read.problem("high_freq_factor", high, f"is not above low_freq_factor, {low}")
        return
    for name in _OPTIONAL:
        if name in parameters:
            read.as_number(name, parameters[name])
    if positions > original * factor:
        rule = f"exceeds {_ORIGINAL} x factor, {original} x {factor:g}, beyond which vLLM has no rotations"
        read.problem("max_position_embeddings", positions, rule)


def _at_least_one(read: HFConfigReader, factor: Any) -> float:
    if type(factor) not in (int, float) or not 1 <= factor < math.inf:
        read.problem("factor", factor, "is not a number of at least 1")
        return 1.0
    return float(factor)


def _are_factors(factors: Any, count: int) -> bool:
    if not isinstance(factors, list):
        return False
    numbers = cast(list[Any], factors)
    return len(numbers) == count and all(type(each) in (int, float) and 0 < each < math.inf for each in numbers)
