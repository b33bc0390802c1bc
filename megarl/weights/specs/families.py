"""The families that have a page."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.types import HeadName
from megarl.weights.specs.family import Family, UnsupportedModelError
from megarl.weights.specs.gpt2 import GPT2
from megarl.weights.specs.llama import LLAMA
from megarl.weights.specs.mistral import MISTRAL
from megarl.weights.specs.mixtral import MIXTRAL
from megarl.weights.specs.phi3 import PHI3
from megarl.weights.specs.qwen2 import QWEN2
from megarl.weights.specs.qwen3 import QWEN3
from megarl.weights.specs.qwen3_moe import QWEN3_MOE
from megarl.weights.specs.reading import HFConfig

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GPT2, MIXTRAL, QWEN3_MOE)
}
"""By HF's ``model_type``."""


def family_of(config: HFConfig) -> tuple[Family, HeadName]:
    """The family of a config and the head that its architecture has.

    Raises:
        UnsupportedModelError: no family has the architecture; the supported ones are named.
    """
    architectures: list[str] = list(config.get("architectures") or [])
    heads: dict[str, tuple[Family, HeadName]] = {}
    for family in FAMILIES.values():
        heads |= {family.lm_class: (family, "lm"), family.score_class: (family, "score")}
    model_type: str | None = config.get("model_type")
    if not architectures and model_type is not None and model_type in FAMILIES:
        return FAMILIES[model_type], "lm"
    if len(architectures) != 1 or architectures[0] not in heads:
        named = ", ".join(architectures) or f"model_type {model_type!r}"
        raise UnsupportedModelError(f"architecture {named} is not supported; supported are {', '.join(heads)}")
    family, head = heads[architectures[0]]
    if model_type not in (None, family.model_type):
        raise UnsupportedModelError(f"model_type {model_type!r} contradicts the architecture {architectures[0]}")
    return family, head
