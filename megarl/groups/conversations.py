"""The processes of a run that hold conversations, between their environments and the engines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megarl.cluster.calls import Call, Process
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import SamplingConfig
from megarl.conversations.chat_session import TurnLimits
from megarl.conversations.environment_process import EnvironmentProcess, TurnRequest
from megarl.conversations.gateway.gateway_request import GatewayConfig, Sampling
from megarl.groups.engines import RolloutGroup, Turn
from megarl.groups.rollouts import GenerateCall, PendingRollouts, work_items
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.requests import stop_token_ids
from megarl.texts import printable
from megarl.types import SampleInfo, SampleRequest, TurnAnswer, WorkItem


class ConversationGroup(WorkerGroup[EnvironmentProcess]):
    """Processes that run conversations, whose turns the engines sample; spread over the nodes, without a device.

    Each process is asked for turns as long as it has conversations. A turn goes to the engine that
    sampled the one before it, which has its prefix, unless that is overloaded. The time limit of a
    process begins again with each turn. Turns move in batches: all that a process is ready to take
    in one call, and all that an engine has sampled in another, so the time of this process per turn
    falls with their number.
    """

    def __init__(
        self, session: Session, processes: Sequence[Process[EnvironmentProcess]], engines: RolloutGroup
    ) -> None:
        super().__init__(session, "environments", processes)
        self._engines = engines
        self._running: list[set[GenerateCall]] = [set() for _ in processes]  # calls for items
        self._sampling: set[int] = set()  # processes whose turns are awaited
        self._engine_of: dict[str, Process[RolloutEngine]] = {}  # that sampled the last turn of a conversation
        self._reported: set[str] = set()  # kinds of failures
        engines.turns_answered = self._answer

    async def start(self) -> None:
        """Starts the processes, each with the address of its node, where a gateway listens."""
        hosts: list[str] = []
        for process in self.processes:
            address = await self._session.free_address(process)
            hosts.append(address.rpartition(":")[0])
        await self.call_each(EnvironmentProcess.start, hosts)

    def close(self) -> Call[None]:
        """Lets every process end by itself; returns at once."""
        return self.call(EnvironmentProcess.close)

    def generate(self, requests: Sequence[SampleRequest], chunks: int) -> PendingRollouts:
        """Holds a conversation per request; returns at once. See `RolloutGroup.generate`."""
        answers: list[asyncio.Task[GenerateCall]] = []
        for item in work_items(requests, chunks):
            process = item.chunk % len(self.processes)
            call = self.call_one(process, EnvironmentProcess.generate, item, [item.chunk])
            self._running[process].add(call)
            answers.append(self.spawn(self._finish(process, item, call)))
            if process not in self._sampling:
                self._sampling.add(process)
                self.spawn(self._sample(process))
        return PendingRollouts(answers=answers)

    async def _finish(self, process: int, item: WorkItem, call: GenerateCall) -> GenerateCall:
        """Waits for the conversations of an item, and prints failures of a new kind."""
        (samples,) = await call
        self._running[process].remove(call)
        for request in item.requests:
            self._engine_of.pop(request.sample_id, None)
        for kind, failure in conversation_failures(samples).items():
            if kind not in self._reported:
                self._reported.add(kind)
                print(
                    f"{failure}\nThe conversation counts as unscored. Similar failures are not shown again; "
                    "environment/failed counts them all.",
                    file=sys.stderr,
                )
        return call

    async def _sample(self, process: int) -> None:
        """Lets the engines sample the turns of a process, as long as it has conversations."""
        while self._running[process]:
            call = self.submit(EnvironmentProcess.next_turns, [()], processes=[self.processes[process]])
            requests: list[TurnRequest]
            (requests,) = await call
            turns: list[Turn] = []
            for request in requests:
                last = self._engine_of.get(request.conversation)
                engine = None if last is None else self._engines.index(last)
                turns.append(Turn(request=request, process=process, engine=engine))
            self._engines.sample(turns)
        self._sampling.remove(process)

    def _answer(self, answers: Sequence[tuple[Turn, TurnAnswer]], engine: Process[RolloutEngine]) -> None:
        """Hands turns to the processes that asked for them."""
        by_process: dict[int, list[TurnAnswer]] = {}
        for turn, answer in answers:
            self._engine_of[turn.request.conversation] = engine
            numbered = replace(answer, number=turn.request.number)
            by_process.setdefault(turn.process, []).append(numbered)
        for process, turns in by_process.items():
            for call in self._running[process]:
                call.restart_limit()
            self.call_at(process, EnvironmentProcess.answer, turns)


def conversation_failures(samples: Sequence[SampleInfo]) -> dict[str, str]:
    """Returns the first failure of each kind: of each exception, or of each sentence."""
    failures: dict[str, str] = {}
    for sample in samples:
        if sample.outcome is None or sample.outcome.failure is None:
            continue
        reason = sample.outcome.failure.strip()
        kind = reason.rpartition("\n")[2].partition(":")[0]
        failures.setdefault(kind, printable(f"the conversation on prompt {sample.prompt_id!r} failed: {reason}"))
    return failures


def _gateway_config(config: SamplingConfig, index: int) -> GatewayConfig:
    rollout = config.rollout
    sampling = Sampling(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)
    functions = config.scored_functions
    judged = config.reward.judge_model is not None
    rewarded = bool(functions) or judged or any("reward" in group.roles for group in config.groups.values())
    return GatewayConfig(file=f"{config.run.dir}/gateway-{index}.json", sampling=sampling, rewarded=rewarded)


def launch_conversations(
    config: SamplingConfig, session: Session, model_dir: str, engines: RolloutGroup
) -> ConversationGroup | None:
    """Launches the processes of the environments, and returns at once; None without an environment."""
    settings = config.environment
    rollout = config.rollout
    if settings is None:
        return None
    _, data = config.rows_section
    limits = TurnLimits(
        context=rollout.max_model_len,
        turn=rollout.max_new_tokens,
        turns=settings.max_turns,
        min_turn=rollout.min_new_tokens,
    )
    tokenizer = config.model.tokenizer_directory(model_dir)
    ends = (*stop_token_ids(model_dir), *rollout.stop_token_ids)
    template = data.chat_template_kwargs
    worker = partial(EnvironmentProcess, settings, tokenizer, template, limits, ends)
    processes: list[Process[EnvironmentProcess]] = []
    for index, place in enumerate(session.spread(settings.processes)):
        served = None
        if settings.name == "gateway":
            served = _gateway_config(config, index)
            session.remove_at_end(Path(served.file))
        process = session.launch(f"environments {index}", partial(worker, served), place=place)
        processes.append(process)
    return ConversationGroup(session, processes, engines)
