"""The worker without Ray: an iteration end to end, and what each stage fetches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megarl.config import load
from megarl.data.schedule import inference_schedule, update_schedules
from megarl.experience.records import StepContext
from megarl.megatron.parallel import GroupCache, build_groups
from megarl.megatron.pipeline import micro_batches
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ExperienceRequest, ForwardRequest, UpdateRequest
from megarl.types import Layout
from tests.megatron.compare import everywhere
from tests.megatron.samples import columns_of, random_chunks
from tests.megatron.tiny import save_model
from tests.pool import RankPool, free_port

ALL_IDS = "model.vocab_size=null"


class Recorded:
    """Chunks that remember which were asked for."""

    def __init__(self, chunks: Any) -> None:
        self._chunks, self.asked = chunks, set()

    def __getitem__(self, chunk: int) -> Any:
        self.asked.add(chunk)
        return self._chunks[chunk]


def worker_of(rank: int, overrides: list[str], port: int, model: Path) -> Any:
    """A worker of the debug run, with its roles; the model's whole vocabulary is in use."""
    worker = MegatronWorker(load("configs/debug/ppo.yaml", [ALL_IDS, *overrides]), "train", rank)
    worker.start(f"tcp://127.0.0.1:{port}")
    worker.load(str(model))
    return worker


def _iteration(rank: int, port: int, model: Path, out: Path) -> dict[str, Any]:
    worker = worker_of(rank, [], port, model)
    config = load("configs/debug/ppo.yaml", [ALL_IDS])
    chunks, infos = random_chunks()

    def passes(role: Any) -> Any:
        layout = config.layout(role)
        schedule = inference_schedule(infos, layout, 40).ranks[layout.coords(rank).dp]
        return ForwardRequest(schedule=schedule, chunks=chunks)

    old = everywhere(worker.logprobs("actor", passes("actor")))
    ref = everywhere(worker.logprobs("reference", passes("reference")))
    values = everywhere(worker.values("critic", passes("critic")))
    scores = everywhere(worker.scores("reward", passes("reward")))
    columns = columns_of(scores, old=old, ref=ref, values=values)
    context = StepContext(kl_coef=0.05, version=0, groups=len(chunks))
    schedule = passes("actor").schedule
    request = ExperienceRequest(schedule=schedule, rollouts=chunks, columns=columns, context=context)
    built = worker.build_experience("actor", request)
    experience = everywhere(built and built[0])
    updates = {}
    for role in ("actor", "critic"):
        plan = update_schedules(infos, config.layout(role), 40, mini_batches=2, epochs=2, seed=0, step=0)
        dp = config.layout(role).coords(rank).dp
        own = [schedule.ranks[dp] for schedule in plan]
        updates[role] = worker.update(role, UpdateRequest(schedules=own, chunks=experience, kl_coef=0.05))
    new = everywhere(worker.logprobs("actor", passes("actor")))
    worker.export("actor", str(out), str(model), str(model))
    worker.close()
    return {"metrics": built and built[1].metrics, "updates": updates, "old": old, "new": new}


@pytest.mark.dist
def test_an_iteration_changes_the_exported_model(pool: RankPool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = save_model(tmp_path / "model")
    results = pool.run(_iteration, free_port(), model, tmp_path / "out", world_size=4, connected=False)
    # Actor TP2 x PP2: rank 2 is TP 0 of the last stage. Critic PP2 x DP2: ranks 2 and 3 are its last stages.
    assert [result["metrics"] is not None for result in results] == [False, False, True, False]
    assert results[2]["metrics"]["objective/kl"] == pytest.approx(0.0, abs=1e-4), "the reference is the actor's copy"
    for role, prefix, reports in (("actor", "policy", [2]), ("critic", "value", [2, 3])):
        told = [rank for rank, result in enumerate(results) if result["updates"][role] is not None]
        assert told == reports
        steps = results[told[0]]["updates"][role]
        assert all(results[rank]["updates"][role] == steps for rank in told)
        assert [set(step) >= {f"{prefix}/loss", f"{prefix}/grad_norm"} for step in steps] == [True] * 4
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    chunks, _ = random_chunks()
    new, old = results[0]["new"], results[0]["old"]
    for index, chunk in enumerate(chunks):
        for row in range(len(chunk.sample_ids)):
            prompt, response = (torch.from_numpy(ids[row]).long() for ids in (chunk.prompt_ids, chunk.response_ids))
            with torch.no_grad():
                logits = exported(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            want = torch.log_softmax(logits, -1).gather(-1, response[:, None])[:, 0]
            torch.testing.assert_close(torch.from_numpy(new[index][row].copy()), want, rtol=0, atol=5e-5)
    moved = max(np.abs(new[c].values - old[c].values).max() for c in range(len(chunks)))
    assert moved > 1e-3, "the update did nothing"


def _fetched(rank: int) -> set[int]:
    chunks, infos = random_chunks()
    recorded = Recorded(chunks)
    (schedule,) = inference_schedule(infos, Layout(pp=4), 40).ranks
    model: Any = SimpleNamespace(groups=build_groups(Layout(pp=4), rank, GroupCache()), routed=None)
    micro_batches(model, schedule, recorded)
    return recorded.asked


@pytest.mark.dist
def test_middle_stages_fetch_no_columns(pool: RankPool) -> None:
    assert pool.run(_fetched, world_size=4) == [{0, 1, 2, 3}, set(), set(), {0, 1, 2, 3}]


def _given_to_engines(rank: int, overrides: list[str]) -> list[str]:
    done: list[str] = []

    def onload(*, weights_only: bool) -> None:
        done.append("weights" if weights_only else "onload")

    def update(*_: Any) -> list[Any]:
        done.append("update")
        return []

    worker: Any = MegatronWorker(load("configs/debug/grpo.yaml", overrides), "train", rank)
    worker._roles["actor"] = SimpleNamespace(reports=False, onload=onload, update=update)
    with patch.object(torch.cuda, "empty_cache", lambda: done.append("empty")):
        worker.update("actor", UpdateRequest(schedules=[], chunks={}, kl_coef=0.0))
        worker.offload_all()
    return done


@pytest.mark.dist
@pytest.mark.parametrize(("sleep", "after"), [("true", ["empty"]), ("false", [])])
def test_cached_gpu_memory_is_released_before_an_engine_uses_the_device(
    pool: RankPool, sleep: str, after: list[str]
) -> None:
    overrides = [f"rollout.sleep={sleep}", "groups.train.roles.actor.offload=false"]
    (done,) = pool.run(_given_to_engines, overrides, world_size=1, connected=False)
    assert done == ["onload", "update", *after, "empty"]
