"""Jobs of ranks: a GPTModel of megatron-core's own, trained, saved and loaded as Megatron-LM's programs do."""

from __future__ import annotations

import argparse
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.convert.directories import Tensors


def save(rank: int, config: dict[str, Any], directory: str, sharding: str) -> Tensors:
    """Saves a model and its sharded optimizer after a step; returns its weights by the names of HF."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with _model(config) as model:
        ddp: Any = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
        )
        optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True), [ddp]
        )
        for parameter in model.parameters():
            parameter.main_grad.normal_()
        ddp.finish_grad_sync()
        optimizer.step()
        metadata = {"singleton_local_shards": False, "distrib_optim_sharding_type": sharding}
        state: dict[str, Any] = {
            "args": argparse.Namespace(num_layers=config["num_hidden_layers"]),
            "checkpoint_version": 3.0,
            "iteration": 7,
            "model": model.sharded_state_dict(metadata=dict(metadata)),
            "rng_state": ShardedObject("rng_state", [torch.get_rng_state()], (1, 1), (0, 0), replica_id=rank),
        }
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=dict(metadata))
        if rank == 0:
            Path(directory).mkdir(parents=True)
        torch.distributed.barrier()
        # In place of a queue of a process of its own, which would outlive this one.
        with patch.object(filesystem_async, "get_write_results_queue", queue.Queue):
            dist_checkpointing.save(state, directory, content_metadata=metadata)
        return _tensors(model, config)


def load(rank: int, config: dict[str, Any], directory: str) -> Tensors:
    """Loads a checkpoint; returns the model's weights by the names of HF."""
    from megatron.core import dist_checkpointing

    with _model(config) as model:
        state: Any = dist_checkpointing.load({"model": model.sharded_state_dict()}, directory)
        assert state["checkpoint_version"] == 3.0
        model.load_state_dict(state["model"], strict=True)
        return _tensors(model, config)


@contextmanager
def _model(config: dict[str, Any]) -> Iterator[Any]:
    """A Llama as Megatron-LM builds it, with its global groups."""
    from megatron.core import parallel_state

    with patch.object(parallel_state, "_GLOBAL_MEMORY_BUFFER", None):  # that of the process serves its other jobs
        parallel_state.initialize_model_parallel()
        try:
            torch.manual_seed(0)
            yield _llama(config)
        finally:
            parallel_state.destroy_model_parallel()


def _llama(config: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    transformer = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    return GPTModel(
        transformer,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=config["vocab_size"],
        max_sequence_length=config["max_position_embeddings"],
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def _tensors(model: Any, config: dict[str, Any]) -> Tensors:
    """By hand: rows of queries, keys and values are stored by group, and those of gate and up one after the other."""
    heads, groups, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tensors = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        rows = state[megatron + "self_attention.linear_qkv.weight"].view(groups, heads // groups + 2, width, -1)
        gate, up = state[megatron + "mlp.linear_fc1.weight"].chunk(2)
        tensors |= {
            hf + "self_attn.q_proj.weight": rows[:, :-2].reshape(heads * width, -1),
            hf + "self_attn.k_proj.weight": rows[:, -2].reshape(groups * width, -1),
            hf + "self_attn.v_proj.weight": rows[:, -1].reshape(groups * width, -1),
            hf + "self_attn.o_proj.weight": state[megatron + "self_attention.linear_proj.weight"],
            hf + "mlp.gate_proj.weight": gate.clone(),
            hf + "mlp.up_proj.weight": up.clone(),
            hf + "mlp.down_proj.weight": state[megatron + "mlp.linear_fc2.weight"],
            hf + "input_layernorm.weight": state[megatron + "input_layernorm.weight"],
            hf + "post_attention_layernorm.weight": state[megatron + "pre_mlp_layernorm.weight"],
        }
    return tensors
