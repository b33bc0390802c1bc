"""One specification per model family: canonical tensors, and shard maps of Megatron and vLLM."""

from __future__ import annotations

from megarl.models.architecture import ModelSpec, model_spec
from megarl.models.families import FAMILIES

__all__ = ["FAMILIES", "ModelSpec", "model_spec"]
