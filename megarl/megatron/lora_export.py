"""Exports of adapters in PEFT's format."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import LoRA
from megarl.megatron.model_engine import ModelEngine
from megarl.megatron.parallel import barrier
from megarl.models.lora import adaptable
from megarl.weights.export import export_plan, export_weights
from megarl.weights.peft_files import ADAPTER_CONFIG, ADAPTER_FILE, PEFT_PREFIX, adapter_config


def export_adapters(
    engine: ModelEngine,
    lora: LoRA,
    directory: Path,
    tokenizer: str,
    model_dir: str,
) -> None:
    """Writes the adapters of a role in PEFT's format, and its head if it has one; collective."""
    spec = engine.spec
    adapters = engine.adapters
    assert adapters is not None
    tensors = {PEFT_PREFIX + name: info for name, info in engine.saved_tensors.items()}
    maps = [engine.saved_map(rank).renamed(PEFT_PREFIX) for rank in range(engine.layout.world_size)]
    parameters = {**engine.model.parameters(), **engine.model.adapters()}
    export_weights(
        directory,
        tensors,
        export_plan(maps, tensors).senders.get(engine.rank),
        {name: parameter.data for name, parameter in parameters.items()},
        config=adapter_config(
            base=model_dir,
            rank=lora.rank,
            alpha=lora.alpha,
            rslora=lora.rslora,
            targets=adapters.targets or adaptable(spec),
            transposed=spec.stores_transposes,
            has_head=engine.head != "lm",
        ),
        template=tokenizer,
        lead=engine.rank == 0,
        barrier=barrier,
        max_file_bytes=sum(info.nbytes for info in tensors.values()),
        names=(ADAPTER_FILE, ADAPTER_CONFIG),
    )
