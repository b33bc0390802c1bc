"""One declarative spec per model family: canonical tensors, Megatron's and vLLM's shard maps."""

from megarl.weights.specs.families import FAMILIES
from megarl.weights.specs.family import UnsupportedModelError
from megarl.weights.specs.model import MegatronArgs, ModelSpec, model_spec

__all__ = ["FAMILIES", "MegatronArgs", "ModelSpec", "UnsupportedModelError", "model_spec"]
