"""A program that runs light workers up to a phase, in which they end in a given way.

It runs one case after another, each in its own session. A case is ``ending:phase``; a line of JSON on
standard error has the driver's error and the leftovers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from megarl.cluster.ray_worker import ChunkRefs
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import load
from megarl.data.prompts import random_prompts, sample_requests
from megarl.groups.engines import RolloutGroup
from megarl.groups.resharder import Resharder, SyncPlanner
from megarl.groups.trainers import RemoteRole, Trainers, launch_group
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest, UpdateRequest
from megarl.stages.ppo.config import PPOConfig
from megarl.types import PackRow, RankSchedule, Schedule
from tests.cluster.ending_workers import CASE, DRIVER, SIGNALS, Engine, Trainer
from tests.cluster.fakes import OPTIONS
from tests.leftovers import Trace, comes_true

RAY = "ray"
"""Before the phases: Ray itself is starting. Nobody but the user can end that."""
LIMIT_S = 1.0
_IN_RAY_S = 0.3
_LATE_S = 10.0


class Run:
    """The parts that the phases need, of the classes of a real run."""

    def __init__(self, config: PPOConfig, session: Session, directory: Path) -> None:
        self._config = config
        self._session = session
        self._directory = directory
        self._schedule = Schedule(ranks=(_one_row(0), _one_row(1)))

    async def start(self) -> None:
        """Two trainers start and load."""
        await Trainers(session=self._session, groups={"train": self._trainers()}, roles={}).start("nowhere")

    async def rollout(self) -> None:
        """An engine generates."""
        prompts = random_prompts(count=2, min_tokens=2, max_tokens=4, vocab_size=90, seed=0)
        engines = self._engines()
        await engines.start()
        await engines.generate(sample_requests(prompts, 1, seed=0, step=1), 2).result()

    async def inference(self) -> None:
        """Trainers compute log-probabilities, which an update waits for."""
        actor = self._actor()
        request = ForwardRequest(schedule=self._schedule, chunks=ChunkRefs.put([0, 1]))
        old = actor.dispatch_by_chunk(MegatronWorker.logprobs, request).chunks
        await actor.dispatch(MegatronWorker.update, UpdateRequest(schedules=[self._schedule], chunks=old))

    async def update(self) -> None:
        """Trainers take an optimizer step."""
        request = UpdateRequest(schedules=[self._schedule], chunks=ChunkRefs.put([0, 1]))
        await self._actor().dispatch(MegatronWorker.update, request)

    async def sync(self) -> None:
        """Trainers send weights to an engine."""
        actor = self._actor()
        planner = SyncPlanner(self._session, self._config, actor)
        resharder = Resharder(planner, self._config.rollout, actor, self._engines())
        await resharder.connect()
        await resharder.sync(version=1)

    async def checkpoint(self) -> None:
        """Trainers save, and all end by themselves."""
        actor = self._actor()
        await actor.call(MegatronWorker.save, str(self._directory))
        await actor.group.call(MegatronWorker.close)

    def _actor(self) -> RemoteRole:
        return RemoteRole(self._trainers(), "actor", self._config.layout("actor"))

    def _trainers(self) -> WorkerGroup[Any]:
        return launch_group(self._session, self._config, "train", Trainer)

    def _engines(self) -> RolloutGroup:
        engine: Any = Engine
        return RolloutGroup(self._session, self._config.rollout, "nowhere", OPTIONS, engine=engine)


def _one_row(chunk: int) -> RankSchedule:
    row = PackRow(chunk=chunk, row=0, prompt_tokens=1, response_tokens=1)
    return RankSchedule(
        packs=((row,),), teachers=("",), pack_tokens=2, total_rows=2, total_sequences=2, total_response_tokens=2
    )


def configuration(case: str) -> PPOConfig:
    """Two ranks and an engine; where one is to hang, the phase may take a second."""
    ending, _, phase = case.partition(":")
    limits = f"{{{phase}: {LIMIT_S}}}" if ending == "hang" else "{}"
    config = load(
        "configs/debug/ppo.yaml",
        [
            f"cluster={{devices_per_node: 2, object_store_mib: 80, time_limits: {limits}}}",
            "groups.train={devices: 0-1, roles: {actor: {tp: 1, pp: 1}}}",
            "groups.train.roles={critic: null, reference: null, reward: null}",
            "algo={advantage: grpo, kl: {coef: 0.0}}",
            "critic=null",
            "reward.functions=[{name: soft_overlong}]",
        ],
    )
    assert isinstance(config, PPOConfig)
    return config


def go_through(case: str, logs: Path) -> dict[str, Any]:
    """Takes a run to its end; returns the driver's error and what was left."""
    trace, config = Trace(), configuration(case)
    ending, _, phase = case.partition(":")
    os.environ.update({**trace.environment(), CASE: case, DRIVER: str(os.getpid())})
    error = ""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        tempfile.tempdir = directory
        try:
            if phase == RAY:
                threading.Timer(_IN_RAY_S, os.kill, (os.getpid(), SIGNALS[ending])).start()
            with Session(config.cluster, logs) as session:
                if phase == RAY:  # it was quicker than the signal
                    time.sleep(_LATE_S)
                session.run(getattr(Run(config, session, logs), phase)())
        except (Exception, SystemExit, KeyboardInterrupt) as caught:
            error = f"{type(caught).__name__}: {caught}"
        if phase == RAY:  # a guard that the signal hits while it starts ends by itself, as its pipe is closed
            comes_true(lambda: not trace.processes(), _LATE_S)
        return {
            "case": case,
            "error": error,
            "processes": trace.processes(),
            "shared_memory": sorted(trace.shared_memory()),
            "temporary": os.listdir(directory),
            "stacks": {file.stem: file.read_text() for file in logs.glob("stacks/*/*.txt")},
        }


def main(cases: list[str]) -> None:
    # A shell starts its background jobs with SIGINT ignored, and the tests may run in one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for case in cases:
        with tempfile.TemporaryDirectory(dir="/tmp") as logs:
            print(json.dumps(go_through(case, Path(logs))), file=sys.stderr, flush=True)  # Ray prints to the other


if __name__ == "__main__":
    main(sys.argv[1:])
