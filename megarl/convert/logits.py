"""Whether Megatron's model of a checkpoint computes what transformers computes of a Hugging Face directory."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megarl.convert.chunks import blocks
from megarl.convert.errors import UsageError
from megarl.convert.held import open_held
from megarl.convert.hf import read_spec
from megarl.convert.locating import Checkpoint, find
from megarl.convert.stored import BoxReader
from megarl.models import model_spec
from megarl.types import Layout, RoleName
from megarl.weights.hf_files import read_config

SEQUENCES, TOKENS = 4, 48
TOLERANCE = 1e-4
"""Of a logit, relative to the largest; float32 in two orders of summation differs by about 1e-6 per layer."""
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two programs' logits are apart.

    Args:
        largest: absolute difference.
        scale: the largest absolute logit.
    """

    largest: float
    scale: float

    @property
    def holds(self) -> bool:
        """Whether they are the same up to rounding."""
        return self.largest <= TOLERANCE * max(1.0, self.scale)

    def __str__(self) -> str:
        verdict = "agree" if self.holds else "DISAGREE"
        return (
            f"the logits of transformers and of Megatron {verdict} in float32 on {SEQUENCES} random sequences: they "
            f"differ by {self.largest:.2e} at most, of {self.scale:.3g} (tolerance: {TOLERANCE:g} of it)"
        )


def compare_logits(hf: Path, checkpoint: Path, *, role: RoleName | None = None, step: int | None = None) -> Agreement:
    """Runs both models on random sequences, in float32, one after the other; each must fit into memory.

    Args:
        hf: the directory that transformers loads.
        checkpoint, role, step: as of ``locating.find``; its model runs in a process of its own.

    Raises:
        UsageError: it is not a language model.
    """
    found, spec = find(checkpoint, role=role, step=step), read_spec(hf)
    if found.head(spec.head) != "lm":
        raise UsageError("--logits compares language models; leave it out for models with a value or score head")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(spec.dims.vocab, (SEQUENCES, min(TOKENS, spec.dims.positions)), generator=generator)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        megatron = torch.from_numpy(pool.submit(_megatron_logits, found, hf, tokens.numpy()).result())
    expected = _transformers_logits(hf, tokens)
    return Agreement(largest=float((megatron - expected).abs().max()), scale=float(expected.abs().max()))


@torch.inference_mode()
def _transformers_logits(hf: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[sequences, tokens, vocabulary] float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)(tokens).logits


@torch.inference_mode()
def _megatron_logits(found: Checkpoint, hf: Path, tokens: np.ndarray) -> np.ndarray:
    """[sequences, tokens, vocabulary] float32, of the checkpoint's weights."""
    from megarl.data.packing import PackShape
    from megarl.megatron.attention import PackParams
    from megarl.megatron.model import build_model
    from megarl.megatron.parallel import GroupCache, build_groups
    from megarl.megatron.platform import start_platform, start_world

    spec, layout = model_spec(read_config(hf), dtype="float32"), Layout()
    platform = start_platform("cpu")
    with tempfile.TemporaryDirectory() as directory:  # where the one rank meets itself
        start_world(platform, rank=0, world_size=1, init_method=f"file://{directory}/store")
        groups = build_groups(layout, 0, GroupCache())
    model = build_model(spec, layout, groups, head="lm", dtype=torch.float32, trainable=False)
    parameters, held = model.parameters(), open_held(found, spec, "lm")
    with BoxReader(_BLOCK_BYTES) as reader:
        for block in blocks(held.map, spec.megatron_map(layout, 0), _BLOCK_BYTES):
            parameters[block.target][block.box.slices] = block.read(held.stored, reader)
    sequences, length = tokens.shape
    shape = PackShape(cu_seqlens=np.arange(sequences + 1, dtype=np.int32) * length, max_seqlen=length)
    params = PackParams.of(shape, platform.device)
    (chunk,) = model.chunks
    hidden = chunk(torch.from_numpy(tokens).reshape(1, -1), None, None, packed_seq_params=params)
    logits = hidden.squeeze(1) @ chunk.output_weight().T
    return logits[:, : spec.dims.vocab].reshape(sequences, length, -1).numpy()
