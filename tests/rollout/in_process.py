"""Functions that run in the engine's process, or in vLLM's workers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.config.schema import Rollout
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.requests import generation_params
from megarl.types import Pickled, RolloutChunk, SampledTurn, SampleInfo, SampleRequest, WorkItem
from tests.leftovers import open_shared_memory


def generate(
    engine: RolloutEngine, requests: Sequence[SampleRequest], sizes: Sequence[int], at_once: int = 100
) -> tuple[list[SampleInfo], list[RolloutChunk]]:
    """Generates the responses to work items of these sizes, with up to `at_once` in progress; in their order."""
    waiting = items(requests, sizes)
    answers = [engine.generate(item) for item in itertools.islice(waiting, at_once)]
    while not all(answer.done() for answer in answers):
        engine.step()
        room = at_once - sum(not answer.done() for answer in answers)
        answers += [engine.generate(item) for item in itertools.islice(waiting, room)]
    infos = [info for answer in answers for info in answer.result()[1]]
    return infos, [answer.result()[0][index] for index, answer in enumerate(answers)]


def sample_turns(engine: RolloutEngine, requests: Sequence[SampleRequest]) -> list[list[tuple[int, SampledTurn]]]:
    """Samples the responses to requests as turns, numbered from 100; returns those of each call for answers."""
    engine.sample_turns([(number, Pickled.of(request)) for number, request in enumerate(requests, 100)])
    answers: list[list[tuple[int, SampledTurn]]] = []
    while sum(map(len, answers)) < len(requests):
        waiting = engine.sampled_turns()
        while not waiting.done():
            engine.step()
        answers.append([(answer.number, answer.turn.value()) for answer in waiting.result()])
    return answers


def beats(engine: RolloutEngine) -> bool:
    """Whether a call for sampled turns returns without any after a heartbeat."""
    waiting = engine.sampled_turns()
    engine._turns._since -= 60.0
    engine.step()
    return waiting.result(timeout=0) == []


def generate_with(engine: RolloutEngine, rollout: Rollout, requests: Sequence[SampleRequest]) -> RolloutChunk:
    """Generates a chunk with other settings, none of which vLLM reads at its start."""
    other = RolloutEngine(engine._model_dir, rollout, engine._options, engine_id=engine._engine_id)
    for name in ("_llm", "_requests", "_state", "_drafts"):
        setattr(other, name, getattr(engine, name))
    return generate(other, requests, [len(requests)])[1][0]


def request_parameters(engine: RolloutEngine, request: SampleRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """What vLLM is asked for to answer a request, and its defaults, by the names of all that it can be asked for."""
    from vllm import SamplingParams

    asked = generation_params(engine._rollout, request, engine._stop_token_ids)
    names = SamplingParams.__struct_fields__
    return tuple({name: getattr(params, name) for name in names} for params in (asked, SamplingParams()))


def sampling_configuration(engine: RolloutEngine) -> dict[str, Any]:
    """What of the running vLLM's configuration changes what is sampled, or the log-probabilities of it."""
    config = engine._llm.vllm_config
    model = config.model_config
    names = ("generation_config", "override_generation_config", "logits_processors", "logprobs_mode")
    others = ("speculative_config", "watermark_config", "diffusion_config")
    return {
        **{name: getattr(model, name) for name in (*names, "enable_trace_replay")},
        **{name: getattr(config, name) for name in others},
        "defaults": model.get_diff_sampling_param(),
    }


def begin(engine: RolloutEngine, requests: Sequence[SampleRequest]) -> None:
    """Begins a response to each request; `end` returns them."""
    asked = vars(engine).setdefault("asked", [])
    asked += [engine.generate(item) for item in items(requests, [1] * len(requests))]


def take_steps(engine: RolloutEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


def end(engine: RolloutEngine) -> list[RolloutChunk]:
    """Ends the responses that were begun; a chunk for each."""
    while engine.step():
        pass
    return [chunk for answer in vars(engine).pop("asked") for chunk in answer.result(0)[0].values()]


def give_up(engine: RolloutEngine, requests: Sequence[SampleRequest], sizes: Sequence[int]) -> tuple[int, list[str]]:
    """Makes the second step fail; returns how many requests vLLM still has, and the errors of unfinished items."""
    answers = [engine.generate(item) for item in items(requests, sizes)]
    engine.step()
    answers = [answer for answer in answers if not answer.done()]
    step = engine._llm.step
    engine._llm.step = lambda: 1 / 0
    assert not engine.step()
    engine._llm.step = step
    return engine._llm.get_num_unfinished_requests(), [repr(answer.exception()) for answer in answers]


def items(requests: Sequence[SampleRequest], sizes: Sequence[int]) -> Iterator[WorkItem]:
    left = iter(requests)
    for chunk, size in enumerate(sizes):
        yield WorkItem(chunk=chunk, requests=tuple(next(left) for _ in range(size)))


def version(engine: RolloutEngine) -> int | None:
    return engine.version


def print_errors_to(_engine: RolloutEngine, log_file: Path) -> None:
    """Sends the errors of this process, and of those that it starts, to a file."""
    with log_file.open("ab") as file:
        os.dup2(file.fileno(), 2)


def free_bytes(_engine: RolloutEngine, gpu: int) -> int:
    """Of the memory of a GPU."""
    import torch

    return torch.cuda.mem_get_info(gpu)[0]


def recv_buffer_bytes(_engine: RolloutEngine) -> int:
    """Of the memory in which weights arrive, what there is in this process."""
    files = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(512 * file.stat().st_blocks for file in files if "megarl-recv" in os.path.realpath(file))


def raise_padding_rows(engine: RolloutEngine) -> list[int]:
    """Makes the rows that pad the output layer produce huge logits; how many rows each rank has of them."""
    return engine._llm.collective_rpc(_raise_padding_rows)


def processes_and_shared_memory(engine: RolloutEngine) -> tuple[list[int], list[str]]:
    """The worker processes, and the shared memory that they or the engine have open."""
    workers = engine._llm.collective_rpc(_pid)
    return [pid for pid in workers if pid != os.getpid()], sorted(
        {f for pid in (os.getpid(), *workers) for f in open_shared_memory(pid)}
    )


def _pid(_worker: Any) -> int:
    return os.getpid()


def _raise_padding_rows(worker: Any) -> int:
    import torch

    head = worker.get_model().lm_head
    rows = head.weight.data[head.shard_indices.num_org_elements :]
    with torch.no_grad():
        rows.copy_(1000 * torch.sign(torch.randn(rows.shape)))
    head.quant_method.process_weights_after_loading(head)
    return len(rows)
