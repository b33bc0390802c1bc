"""The worker without Ray: weights in and out of every layout, what each stage fetches, and an iteration end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megarl.experience.records import StepContext
from tests.megatron.samples import columns_of, random_chunks
from tests.megatron.tiny import save_model
from tests.pool import RankPool, free_port

ALL_IDS = "model.vocab_size=null"
LAYOUTS = {
    "default": [],
    "pp4": ["groups.train.roles.actor.tp=1", "groups.train.roles.actor.pp=4"],
    "dp": ["groups.train.roles.actor.tp=1", "groups.train.roles.actor.pp=1", "groups.train.roles.critic.pp=1"],
}


class Recorded:
    """Chunks that remember which were asked for."""

    def __init__(self, chunks: Any) -> None:
        self._chunks, self.asked = chunks, set()

    def __getitem__(self, chunk: int) -> Any:
        self.asked.add(chunk)
        return self._chunks[chunk]


def _worker(rank: int, overrides: list[str], port: int) -> Any:
    from megarl.config import load
    from megarl.megatron.worker import MegatronWorker

    worker = MegatronWorker(load("configs/debug/ppo.yaml", overrides), "train", rank)
    worker.start(f"tcp://127.0.0.1:{port}")
    return worker


def _round_trip(rank: int, overrides: list[str], port: int, model: Path, out: Path) -> None:
    worker = _worker(rank, overrides, port)
    worker.load(str(model))
    for role in ("actor", "reference", "critic"):
        worker.export(role, str(out / role), str(model))
    worker.close()


@pytest.mark.dist
@pytest.mark.parametrize(("layout", "tied"), [("default", True), ("dp", False)])
def test_weights_round_trip_bit_for_bit(pool: RankPool, tmp_path: Path, layout: str, tied: bool) -> None:
    from safetensors.torch import load_file

    model = save_model(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    pool.run(_round_trip, [ALL_IDS, *LAYOUTS[layout]], free_port(), model, tmp_path, world_size=4, connected=False)
    source = load_file(model / "model.safetensors")
    for role in ("actor", "reference"):
        found = load_file(tmp_path / role / "model.safetensors")
        assert found.keys() == source.keys()
        for name, tensor in source.items():
            assert torch.equal(found[name], tensor), f"{role}: {name}"
    critic = load_file(tmp_path / "critic" / "model.safetensors")
    assert critic.keys() == source.keys() - {"lm_head.weight"} | {"score.weight"}
    assert all(torch.equal(critic[name], source[name]) for name in critic.keys() - {"score.weight"})


def _iteration(rank: int, overrides: list[str], port: int, model: Path, out: Path) -> dict[str, Any]:
    import torch.distributed as dist

    from megarl.config import load
    from megarl.data.schedule import inference_schedule, update_schedules
    from megarl.megatron.worker_requests import ExperienceRequest, ForwardRequest, UpdateRequest

    worker = _worker(rank, overrides, port)
    worker.load(str(model))
    config = load("configs/debug/ppo.yaml", overrides)
    chunks, infos = random_chunks()
    rollouts = Recorded(chunks)

    def everywhere(result: dict[int, Any] | None) -> dict[int, Any]:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, result)
        return {chunk: value for part in parts if part for chunk, value in part.items()}

    def passes(role: Any) -> Any:
        layout = config.layout(role)
        schedule = inference_schedule(infos, layout, 40).ranks[layout.coords(rank).dp]
        return ForwardRequest(schedule=schedule, chunks=rollouts)

    old = everywhere(worker.logprobs("actor", passes("actor")))
    asked = set(rollouts.asked)
    ref = everywhere(worker.logprobs("reference", passes("reference")))
    values = everywhere(worker.values("critic", passes("critic")))
    scores = everywhere(worker.scores("reward", passes("reward")))
    columns = columns_of(scores, old=old, ref=ref, values=values)
    context = StepContext(kl_coef=0.05, version=0, groups=len(chunks))
    schedule = passes("actor").schedule
    request = ExperienceRequest(schedule=schedule, rollouts=rollouts, columns=columns, context=context)
    built = worker.build_experience("actor", request)
    experience = everywhere(built and built[0])
    updates = {}
    for role in ("actor", "critic"):
        plan = update_schedules(infos, config.layout(role), 40, mini_batches=2, epochs=2, seed=0, step=0)
        dp = config.layout(role).coords(rank).dp
        own = [schedule.ranks[dp] for schedule in plan]
        updates[role] = worker.update(role, UpdateRequest(schedules=own, chunks=experience, kl_coef=0.05))
    new = everywhere(worker.logprobs("actor", passes("actor")))
    worker.export("actor", str(out), str(model))
    worker.close()
    return {
        "asked": asked,
        "metrics": built and built[1].metrics,
        "updates": updates,
        "old": old,
        "ref": ref,
        "new": new,
    }


@pytest.fixture(scope="module")
def plain(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """An iteration in the default layout: its directory, with the model and the export, and its results."""
    directory = tmp_path_factory.mktemp("plain")
    model = save_model(directory / "model", "qwen2")
    results = pool.run(_iteration, [ALL_IDS], free_port(), model, directory / "out", world_size=4, connected=False)
    return directory, results


@pytest.mark.dist
def test_an_iteration_changes_the_exported_model(plain: tuple[Path, list[Any]]) -> None:
    from transformers import AutoModelForCausalLM

    directory, results = plain
    # Actor TP2 x PP2: rank 2 is TP 0 of the last stage. Critic PP2 x DP2: ranks 2 and 3 are its last stages.
    assert [result["metrics"] is not None for result in results] == [False, False, True, False]
    assert results[2]["metrics"]["objective/kl"] == pytest.approx(0.0, abs=1e-4), "the reference is the actor's copy"
    for role, prefix, reports in (("actor", "policy", [2]), ("critic", "value", [2, 3])):
        told = [rank for rank, result in enumerate(results) if result["updates"][role] is not None]
        assert told == reports
        steps = results[told[0]]["updates"][role]
        assert all(results[rank]["updates"][role] == steps for rank in told)
        assert [set(step) >= {f"{prefix}/loss", f"{prefix}/grad_norm"} for step in steps] == [True] * 4
    exported = AutoModelForCausalLM.from_pretrained(directory / "out", dtype=torch.float32)
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


@pytest.mark.dist
def test_offloading_and_recomputation_are_bit_exact(
    pool: RankPool, plain: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    roles = "groups.train.roles"
    economical = [f"{roles}.{role}.offload=true" for role in ("actor", "critic", "reference", "reward")]
    economical += [f"{roles}.actor.recompute=full", f"{roles}.critic.recompute=selective"]
    directory, results = plain
    economic = pool.run(
        _iteration,
        [ALL_IDS, *economical],
        free_port(),
        directory / "model",
        tmp_path / "out",
        world_size=4,
        connected=False,
    )
    for one, other in zip(results, economic, strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["updates"] == other["updates"]
        for column in ("old", "ref", "new"):
            assert all(np.array_equal(one[column][c].values, other[column][c].values) for c in range(4)), column


@pytest.mark.dist
def test_middle_stages_fetch_no_columns(pool: RankPool, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen2")
    results = pool.run(
        _iteration, [ALL_IDS, *LAYOUTS["pp4"]], free_port(), model, tmp_path / "out", world_size=4, connected=False
    )
    assert [result["asked"] for result in results] == [{0, 1, 2, 3}, set(), set(), {0, 1, 2, 3}]


class _Role:
    """A role in training that notes what it does."""

    reports = False

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def onload(self) -> None:
        self._done.append("onload")

    def update(self, *_: Any) -> list[Any]:
        self._done.append("update")
        return []


def _given_to_engines(rank: int, overrides: list[str]) -> list[str]:
    from megarl.config import load
    from megarl.megatron.worker import MegatronWorker
    from megarl.megatron.worker_requests import UpdateRequest

    done: list[str] = []
    worker: Any = MegatronWorker(load("configs/debug/grpo.yaml", overrides), "train", rank)
    worker._roles["actor"] = _Role(done)
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
