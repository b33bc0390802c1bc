"""The driver's time per turn of conversations: engines answer at once, environments take their next turn at once.

    python -m benchmarks.turns [--conversations 250,500,1000] [--turns 20] [--tokens 100]

Prints milliseconds of the driver's main thread per turn, by the number of conversations at the same time. Each turn
adds ``--tokens`` ids to its conversation. Ray, the dispatch of the turns and their answers are real; engines and
environments stand in for vLLM and for programs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.turns.instant import ROOM, InstantEngine, InstantEnvironment
from megarl.cluster.session import Session
from megarl.config.schema import Cluster, Rollout, Threads
from megarl.groups.conversations import ConversationGroup
from megarl.groups.engines import RolloutGroup
from megarl.rollout.engine_options import EngineOptions
from megarl.types import Prompt, SampleRequest

_ENGINES = 2
_PROCESSES = 2


async def _launch(session: Session, turns: int, tokens: int) -> ConversationGroup:
    rollout = Rollout(devices=f"0-{_ENGINES - 1}", max_new_tokens=1, max_model_len=ROOM)
    engines = RolloutGroup(session, rollout, "", EngineOptions(vocab_size=1, device="cpu"), engine=InstantEngine)
    processes = [
        session.launch(f"environments {index}", partial(InstantEnvironment, turns, tokens))
        for index in range(_PROCESSES)
    ]
    group = ConversationGroup(session, processes, engines)
    await engines.start()
    await group.start()
    return group


async def _measure(group: ConversationGroup, conversations: int, tokens: int) -> tuple[float, float]:
    """Returns the milliseconds of the main thread and of the clock per turn."""
    requests: list[SampleRequest] = []
    for index in range(conversations):
        prompt = Prompt(prompt_id=f"p{index}", token_ids=(1,) * tokens)
        requests.append(SampleRequest(sample_id=f"s{index}", prompt=prompt, seed=index))
    began = time.perf_counter()
    used = time.thread_time()
    rollouts = await group.generate(requests, 8 * _PROCESSES).result()
    used = time.thread_time() - used
    took = time.perf_counter() - began
    turns = sum(sample.outcome.turns for sample in rollouts.samples if sample.outcome is not None)
    return 1e3 * used / turns, 1e3 * took / turns


async def _measure_all(session: Session, counts: Sequence[int], turns: int, tokens: int) -> None:
    """Prints a line per number of conversations."""
    group = await _launch(session, turns, tokens)
    await _measure(group, _PROCESSES, tokens)
    for conversations in counts:
        used, took = await _measure(group, conversations, tokens)
        print(f"{conversations:6} conversations   driver {used:.3f} ms a turn   clock {took:.3f} ms", flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("--conversations", default="250,500,1000")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100)
    given = parser.parse_args(arguments)
    cluster = Cluster(device="cpu", devices_per_node=_ENGINES, threads_per_device=Threads(trainers=1, engines=1))
    counts = [int(count) for count in given.conversations.split(",")]
    with tempfile.TemporaryDirectory() as directory, Session(cluster, Path(directory)) as session:
        session.run(_measure_all(session, counts, given.turns, given.tokens))


if __name__ == "__main__":
    main(sys.argv[1:])
