"""One declarative spec per model family: canonical tensors, Megatron's and vLLM's shard maps."""

from __future__ import annotations

from megarl.models.architecture import FAMILIES, MegatronArgs, ModelSpec, model_spec
from megarl.models.hf_config import UnsupportedModelError

__all__ = ["FAMILIES", "MegatronArgs", "ModelSpec", "UnsupportedModelError", "model_spec"]
