"""vLLM alone on the requests of a run: python -m benchmarks.gpu.raw_vllm SIZE RESULT.json [ours]

By default as vLLM sets itself up, with its engine in a process of its own and its share of the GPU's memory; with
`ours` in the environment and with the cache of a run's engine. Both return the log-probability of each sampled token.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.work import SIZES

ROUNDS = 3


def main(name: str, result: Path, *, ours: bool) -> None:
    from megarl.rollout.vllm_environment import set_vllm_environment, vllm_device

    size, device = SIZES[name], vllm_device()
    os.environ.update({"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"})
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {}
        if ours:
            set_vllm_environment(device or "cuda", directory)
            options = {"gpu_memory_utilization": 0.01, "block_size": 32, "logprobs_mode": "processed_logprobs"}
        if ours or device == "cpu":  # where vLLM would take most of the memory
            options["kv_cache_memory_bytes"] = size.cache_mib * 2**20
        (Path(directory) / "config.json").write_text(json.dumps(size.hf_config))
        from vllm import LLM, SamplingParams

        llm = LLM(
            directory,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=size.dtype,
            enforce_eager=device == "cpu",
            max_model_len=size.prompt_tokens + size.new_tokens,
            **options,
        )
        asked = SamplingParams(
            n=size.samples,
            max_tokens=size.new_tokens,
            logprobs=0,
            stop_token_ids=size.stop_token_ids,
            ignore_eos=True,
            detokenize=False,
        )
        rng, speeds = random.Random(0), []
        for _ in range(ROUNDS):
            lengths = [rng.randint(8, size.prompt_tokens) for _ in range(size.prompts)]
            prompts = [{"prompt_token_ids": [rng.randrange(size.vocab) for _ in range(n)]} for n in lengths]
            start = time.perf_counter()
            outputs = llm.generate(prompts, asked, use_tqdm=False)
            seconds = time.perf_counter() - start
            speeds.append(sum(len(one.token_ids) for output in outputs for one in output.outputs) / seconds)
    result.write_text(json.dumps({"perf/rollout_tokens_per_second": max(speeds)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), ours=sys.argv[3:] == ["ours"])
