"""How deep the call stack of a worker is where a policy loss is computed, read off a real update."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch

from megarl.algos.policy_loss import LossTerms, ppo
from tests.megatron.compare import everywhere
from tests.megatron.layouts import STEPS, chunks, experience, samples
from tests.megatron.test_worker_roles import LAYOUT, worker_of
from tests.megatron.tiny import save_model
from tests.pool import RankPool, free_port

OURS = 6
"""``MegatronWorker.update``, ``ModelEngine.update``, ``run_schedule``, ``_finish``, the loss, and the loss function."""
MEGATRONS = 3
"""The pipeline schedule, ``forward_step`` and ``forward_step_calc_loss``."""

STACKS: list[list[tuple[str, str]]] = []


def recording_loss(
    new_logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> LossTerms:
    """PPO's loss; notes the file and the function of every frame above it."""
    STACKS.append([(frame.filename, frame.name) for frame in traceback.extract_stack()])
    return ppo(new_logprobs, old_logprobs, advantages, response_mask)


def _stacks(rank: int, port: int, model: Path) -> list[list[tuple[str, str]]]:
    """The frames below the test's own call of ``MegatronWorker.update``, by micro-batch."""
    from megarl.config import load
    from megarl.data.schedule import inference_schedule, step_schedule
    from megarl.megatron.worker_requests import ForwardRequest, UpdateRequest

    overrides = ["model.vocab_size=null", *LAYOUT, f"algo.policy_loss={__name__}:recording_loss"]
    worker = worker_of(rank, overrides, port, model)
    layout = load("configs/debug/ppo.yaml", overrides).layout("actor")
    request = ForwardRequest(schedule=inference_schedule(samples(), layout, 40).ranks[0], chunks=chunks())
    columns = experience(everywhere(worker.logprobs("actor", request)))
    STACKS.clear()
    plan = step_schedule([samples()[i] for i in STEPS[0]], layout, 40)
    worker.update("actor", UpdateRequest(schedules=[plan.ranks[0]], chunks=columns, kl_coef=0.1))
    worker.close()
    return [stack[[name for _, name in stack].index("_stacks") + 1 :] for stack in STACKS]


@pytest.mark.dist
def test_few_calls_lie_between_the_worker_and_the_loss(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(_stacks, free_port(), save_model(tmp_path / "model"), world_size=4, connected=False)
    stacks = [stack for rank in ranks for stack in rank]
    assert stacks, "no rank has computed the loss"
    for stack in stacks:
        whose = Counter("megatron" if "/megatron/core/" in file else "ours" for file, _ in stack)
        assert stack[0][1] == "update"
        assert stack[-1][1] == "recording_loss"
        assert whose == {"ours": OURS, "megatron": MEGATRONS}, [name for _, name in stack]
