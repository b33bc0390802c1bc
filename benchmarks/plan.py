"""Planning time and memory for a 405B Llama on 512 training ranks and 512 rollout ranks; no weights, no devices."""

from __future__ import annotations

import functools
import resource
from statistics import median
from time import perf_counter

from megarl.types import Layout, RankCoords
from megarl.weights.planner import Holder, plan
from megarl.weights.regions import ShardMap
from megarl.weights.specs import model_spec

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
TRAINER = Layout(tp=8, pp=14, dp=4)
"""448 ranks: the largest part of 512 over which 126 layers divide evenly at TP 8."""
ENGINE_TP, ENGINES = 8, 64
DEVICES_PER_NODE = 8
GIB = 1 << 30


def main() -> None:
    spec = model_spec(LLAMA_405B)
    start = perf_counter()

    @functools.cache
    def held_by(tp: int, pp: int) -> ShardMap:
        return spec.megatron_map(TRAINER, TRAINER.rank(RankCoords(tp=tp, dp=0, pp=pp)))

    coords = [TRAINER.coords(rank) for rank in range(TRAINER.world_size)]
    sources = [
        Holder(rank=rank, map=held_by(at.tp, at.pp), node=rank // DEVICES_PER_NODE) for rank, at in enumerate(coords)
    ]
    shards = [spec.vllm_map(ENGINE_TP, rank) for rank in range(ENGINE_TP)]
    ranks = range(len(sources), len(sources) + ENGINE_TP * ENGINES)
    engines = [Holder(rank=r, map=shards[r % ENGINE_TP], node=r // DEVICES_PER_NODE) for r in ranks]
    mapped = perf_counter()
    transfer = plan(sources, engines, GIB)
    planned = perf_counter()

    sent = [sender.nbytes for sender in transfer.senders.values()]
    needed = sum(shard.nbytes for shard in shards) * ENGINES
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{len(sources)} trainer ranks, {len(engines)} engine ranks, buckets of {transfer.staging_bytes / GIB:.2f} GiB"
    )
    print(f"maps {mapped - start:.2f} s, plan {planned - mapped:.2f} s, process {peak:.2f} GiB at most")
    print(
        f"{transfer.nbytes / GIB:.0f} GiB in {transfer.num_messages} messages, {transfer.nbytes / needed:.4f} of need"
    )
    print(f"sent per trainer rank: median {median(sent) / GIB:.1f} GiB, largest {max(sent) / GIB:.1f} GiB")
    print(f"received per engine rank: {max(r.nbytes for r in transfer.receivers.values()) / GIB:.1f} GiB")


if __name__ == "__main__":
    main()
