"""What drafts gain: tokens per second of an engine with drafts, as a ratio to one without, side by side.

    python -m benchmarks.drafts [--tokens 64] [--layers 8] [--rounds 3]

A random model answers prompts of a repeated pattern: greedily, where it repeats itself, and at temperature 1, where it
does not; alone and 16 at once. Each engine has a process; the two take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from megarl.config.schema import Rollout
from megarl.rollout.drafts import DraftCounts
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.engine_options import EngineOptions
from megarl.types import Prompt, SampleRequest, WorkItem

DRAFTS = 4
PROMPT = 64
VOCAB = 2048
CASES = {
    "greedy, alone": (0.0, 1),
    "greedy, 16 at once": (0.0, 16),
    "random, alone": (1.0, 1),
    "random, 16 at once": (1.0, 16),
}
"""Temperature and number of responses at once."""


def random_model(directory: Path, layers: int) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config, set_seed

    set_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,  # it repeats its last token
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def requests(temperature: float, count: int) -> tuple[SampleRequest, ...]:
    asked: list[SampleRequest] = []
    for index in range(count):
        ids = tuple(10 + (position + index) % 8 for position in range(PROMPT))
        prompt = Prompt(prompt_id=f"p{index}", token_ids=ids)
        asked.append(SampleRequest(sample_id=f"s{index}", prompt=prompt, seed=index, temperature=temperature))
    return tuple(asked)


def serve(pipe: Connection, model_dir: Path, tokens: int, drafts: int) -> None:
    """Answers each case with tokens per second and counts of drafts, until there is none."""
    rollout = Rollout(
        devices="0",
        max_new_tokens=tokens,
        max_model_len=PROMPT + tokens,
        kv_cache_mib=256,
        ignore_eos=True,
        speculative=drafts,
    )
    options = EngineOptions(vocab_size=VOCAB, device="cpu", weights="files", threads=2)
    engine = RolloutEngine(model_dir, rollout, options, engine_id=0)
    engine.start()
    pipe.send("started")
    while case := pipe.recv():
        item = WorkItem(chunk=0, requests=requests(*case))
        engine.take_drafts()
        start = time.perf_counter()
        done = engine.generate(item)
        while not done.done():
            engine.step()
        done.result()
        pipe.send((tokens * len(item.requests) / (time.perf_counter() - start), engine.take_drafts()))
    engine.close()


def ask(pipe: Connection, case: tuple[float, int]) -> tuple[float, DraftCounts]:
    pipe.send(case)
    return pipe.recv()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        random_model(Path(directory), given.layers)
        pipes: list[Connection] = []
        for drafts in (0, DRAFTS):
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs, Path(directory), given.tokens, drafts)).start()
            assert ours.recv() == "started"
            pipes.append(ours)
        print(f"{'':20} {'without':>9} {'with':>9} {'ratio':>6} {'accepted':>9} {'share':>6}")
        for name, case in CASES.items():
            speeds: list[tuple[float, float]] = []
            counts = DraftCounts()
            for _ in range(given.rounds + 1):
                (without, _), (with_drafts, counts) = (ask(pipe, case) for pipe in pipes)
                speeds.append((without, with_drafts))
            without, with_drafts = (median(values) for values in zip(*speeds[1:], strict=True))
            acceptance = counts.accepted / max(counts.drafted, 1)
            share = counts.accepted / counts.sampled
            ratio = with_drafts / without
            print(
                f"{name:20} {without:9.0f} {with_drafts:9.0f} {ratio:6.2f} {acceptance:9.0%} {share:6.0%}", flush=True
            )
        for pipe in pipes:
            pipe.send(None)


if __name__ == "__main__":
    main()
