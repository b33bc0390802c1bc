"""TRL's GRPO (1.16) on the work of a run: python -m benchmarks.gpu.trl_grpo SIZE RESULT.json STEPS

The same model, number and lengths of prompts, group size, stop tokens, length limit, reward and penalty; one optimizer
step per batch, and nothing is recomputed. Micro-batches are padded, with at most the tokens of a run's packs. TRL keeps
float32 weights and computes in bfloat16. On a GPU, vLLM is colocated and sleeps; on a CPU, transformers generates, as
vLLM's CPU build packs its weights, into which TRL cannot write.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.gpu.work import SIZES, Size

_END = "<end>"
_OTHER_BYTES = 6 << 30
"""What vLLM takes besides its cache, as TRL passes on a fraction of the memory."""


def micro_batch(size: Size) -> int:
    """Returns the sequences of a micro-batch, a power of two."""
    return 1 << (size.micro_batch // (size.prompt_tokens + size.new_tokens)).bit_length() - 1


def write_model(directory: Path, size: Size) -> Any:
    """Writes a random model, and returns its tokenizer, which reads token ids: `3 14` are the ids 3 and 14.

    AutoTokenizer, which vLLM uses, would make one of Qwen2 of it; TRL gives vLLM ids.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    fields = dict(size.hf_config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.generation_config = GenerationConfig(eos_token_id=[0, *size.stop_token_ids])
    model.save_pretrained(directory)
    vocab = {_END: 0, **{str(token): token for token in range(1, size.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=_END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    reader = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END)
    reader.save_pretrained(directory)
    return reader


def prompts(size: Size, count: int) -> list[str]:
    """Returns random prompts, of the lengths of a run's."""
    rng = random.Random(0)
    lengths = [rng.randint(8, size.prompt_tokens) for _ in range(count)]
    return [" ".join(str(rng.randrange(1, size.vocab)) for _ in range(length)) for length in lengths]


def overlong(size: Size, responses: Sequence[Sequence[int]]) -> list[float]:
    """Returns the run's reward, `soft_overlong`."""
    buffer = size.new_tokens // 2
    return [min(0.0, (size.new_tokens - buffer - len(ids)) / buffer) for ids in responses]


def figures(times: Sequence[float], rollouts: Sequence[float], log: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns means over all steps but the first, under the names that a run's metrics have.

    Args:
        times: at the start, and at the end of each step.
        rollouts: seconds of each step's sync and generation.
        log: of each step; `num_tokens` is a total.
    """
    took = [end - start for start, end in itertools.pairwise(times[1:])]
    tokens = log[-1]["num_tokens"] - log[0]["num_tokens"]
    return {
        "time/step": mean(took),
        "time/rollout": mean(rollouts[1:]),
        "perf/tokens_per_second": tokens / sum(took),
        "response_length/mean": mean(entry["completions/mean_length"] for entry in log[1:]),
    }


def main(name: str, result: Path, steps: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    size, cuda = SIZES[name], torch.cuda.is_available()
    responses, sequences, times, rollouts = size.prompts * size.samples, micro_batch(size), [0.0], list[float]()

    if not cuda:
        torch.set_num_threads(1)  # as in the processes of a run

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    class TimedTrainer(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            generated = super()._generate_single_turn(*args, **options)
            rollouts.append(time.perf_counter() - start)
            return generated

    with tempfile.TemporaryDirectory() as directory:
        tokenizer = write_model(Path(directory), size)
        vllm = {}
        if cuda:
            total = torch.cuda.get_device_properties(0).total_memory
            vllm = {
                "vllm_mode": "colocate",
                "vllm_enable_sleep_mode": True,
                "vllm_gpu_memory_utilization": min(0.9, (size.cache_mib * 2**20 + _OTHER_BYTES) / total),
                "vllm_max_model_length": size.prompt_tokens + size.new_tokens,
            }
        settings = GRPOConfig(
            output_dir=f"{directory}/out",
            max_steps=steps,
            per_device_train_batch_size=sequences,
            gradient_accumulation_steps=responses // sequences,
            num_generations=size.samples,
            max_completion_length=size.new_tokens,
            beta=0.001,
            loss_type="grpo",
            learning_rate=1e-6,
            bf16=size.dtype == "bfloat16",
            gradient_checkpointing=False,
            use_vllm=cuda,
            use_cpu=not cuda,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **vllm,
        )
        trainer = TimedTrainer(
            model=directory,
            reward_funcs=lambda completion_ids, **_: overlong(size, completion_ids),
            args=settings,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": prompts(size, steps * size.prompts)}),
            callbacks=[Clock()],
        )
        times[0] = time.perf_counter()
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    print(
        f"{responses} responses a step in micro-batches of {sequences}; {'vLLM' if cuda else 'transformers'} generates"
    )
    result.write_text(json.dumps(figures(times, rollouts, log)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
