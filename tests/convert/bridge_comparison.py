"""Compares the map of Megatron's parameters with Megatron-Bridge's mappings; a program, which is given families.

Its packages import all models, and Transformer Engine; only the modules of the family are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megarl.models import ModelSpec, model_spec
from megarl.types import Layout
from tests.weights import models
from tests.weights.models import placed

BRIDGES: Mapping[str, dict[str, Any]] = {
    "llama.llama_bridge.LlamaBridge": models.llama_config(),
    "mistral.mistral_bridge.MistralBridge": models.mistral_config(),
    "qwen.qwen2_bridge.Qwen2Bridge": models.qwen2_config(),
    "qwen.qwen3_bridge.Qwen3Bridge": models.qwen3_config(),
    "qwen.qwen3_moe_bridge.Qwen3MoEBridge": models.qwen3_moe_config(),
    "qwen.qwen3_next_bridge.Qwen3NextBridge": models.qwen3_next_config(),
    "glm.glm45_bridge.GLM45Bridge": models.glm4_moe_config(),
    "glm.glm47_flash_bridge.GLM47FlashBridge": models.glm4_moe_lite_config(),
    "deepseek.deepseek_v2_bridge.DeepSeekV2Bridge": models.deepseek_v2_config(),
    "deepseek.deepseek_v3_bridge.DeepSeekV3Bridge": models.deepseek_v3_config(),
    "gemma.gemma3_bridge.Gemma3ModelBridge": models.gemma3_config(),
}
EXPERTS = "mlp.experts."


class ColumnParallelLinear(torch.nn.Module):
    """Stands for any module: without tensor parallelism mappings ask for its config and its device alone."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(0))


def mappings(path: str, config: dict[str, Any]) -> Any:
    """The mappings of a bridge."""
    import megatron
    from transformers import AutoConfig

    base = next(Path(each, "bridge") for each in megatron.__path__ if Path(each, "bridge").is_dir())
    module, _, name = path.rpartition(".")
    family = module.partition(".")[0]
    for package in ("", ".models", ".models.conversion", f".models.{family}"):
        bare = ModuleType(f"megatron.bridge{package}")
        bare.__path__ = [str(base.joinpath(*package.split(".")))]
        sys.modules[bare.__name__] = bare
    adapters: Any = ModuleType("megatron.bridge.models.conversion.peft_bridge")  # needs Transformer Engine
    adapters.__getattr__ = _class
    sys.modules[adapters.__name__] = adapters
    bridge = getattr(import_module(f"megatron.bridge.models.{module}"), name)()
    bridge.hf_config = AutoConfig.for_model(**config)
    bridge.hf_pretrained = None
    return bridge.mapping_registry()


def _class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def held(spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a rank alone, the experts one by one."""
    for name, value in placed(tensors, spec.megatron_map(Layout(), 0)).items():
        _, _, local = name.partition(":")
        if EXPERTS in local:
            for expert, part in enumerate(value):
                yield f"{local}{expert}", part
        else:
            yield local, value


def compare(path: str, config: dict[str, Any]) -> None:
    spec = model_spec(config)
    torch.manual_seed(0)
    tensors = {name: torch.randn(info.shape) for name, info in spec.canonical().items()}
    fields = SimpleNamespace(**spec.transformer_fields())
    module = ColumnParallelLinear(fields)
    registry = mappings(path, config)
    seen: set[str] = set()
    for name, value in held(spec, tensors):
        mapping = registry.megatron_to_hf_lookup(name)
        assert mapping is not None, f"{path}: {name} is unknown"
        names = mapping.hf_param
        given = tensors[names] if isinstance(names, str) else {key: tensors[each] for key, each in names.items()}
        theirs = mapping.hf_to_megatron(given, module)
        ours = value[: len(theirs)] - int(spec.is_centred(name))
        assert torch.equal(ours, theirs), f"{path}: {name} is another"
        for each, tensor in mapping.megatron_to_hf(theirs, module).items():
            torch.testing.assert_close(tensor, tensors[each], rtol=0, atol=1e-6 * spec.is_centred(name), msg=each)
            seen.add(each)
    assert seen == tensors.keys(), f"{path}: {seen ^ tensors.keys()}"


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        compare(chosen, BRIDGES[chosen])
        print(chosen)
