"""The threads of processes on a CPU: how cores are divided, and that a resumed run keeps its numbers."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import yaml

from megarl.cluster import cpu_threads
from megarl.cluster.cpu_threads import divided, kept_message, usable_cores, with_threads
from megarl.cluster.session import Session
from megarl.cluster.workers import WorkerGroup
from megarl.config import ConfigError, load
from megarl.config.loading import as_yaml
from megarl.config.schema import Threads
from tests.cluster.conftest import DEBUG
from tests.cluster.fakes import FakeStepper, FakeWorker

AUTO = "cluster.threads_per_device=auto"
APART = ["groups.train.devices=0-1", "groups.train.roles.actor={tp: 1, pp: 1}", "rollout.devices=2-3"]
ROLES = ["groups.train.roles.critic={tp: 1, pp: 1}", "groups.train.roles.reference={tp: 1, pp: 1}"]


NODES = ["cluster.nodes=2", "cluster.devices_per_node=2"]
MACHINES = [*NODES, "cluster.address=auto"]


@pytest.mark.parametrize(
    ("cores", "overrides", "trainers", "engines"),
    [
        (1, [], 1, 1),
        (2, [], 1, 2),
        (8, [], 2, 8),
        (11, ["rollout={tp: 2, devices: 0-1}"], 2, 5),
        (8, [*APART, *ROLES], 4, 4),
        (8, [*APART, *ROLES, "rollout.max_staleness=1"], 2, 2),
        (9, [*APART, *ROLES, "rollout.inference_parts=2"], 2, 2),
        (8, NODES, 2, 8),
        (8, MACHINES, 4, 8),
        (8, [*MACHINES, "rollout={tp: 2, devices: 0-1}"], 4, 4),
        (8, [*MACHINES, *APART, *ROLES, "rollout.max_staleness=1"], 4, 4),
    ],
)
def test_the_cores_of_a_machine_are_divided_among_the_processes_of_a_phase(
    cores: int, overrides: list[str], trainers: int, engines: int
) -> None:
    assert divided(load(DEBUG, overrides), cores) == Threads(trainers=trainers, engines=engines)


def test_a_stage_without_engines_has_all_cores_for_the_trainers() -> None:
    config = load(DEBUG.with_stem("sft"))
    assert divided(config, 8).trainers == 8 // len(config.device_list("train"))


def test_a_resumed_run_keeps_its_thread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    automatic = load(DEBUG, [AUTO])
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 8)
    begun = with_threads(automatic, {})
    assert begun.cluster.threads_per_device == Threads(trainers=2, engines=8)
    written = yaml.safe_load(as_yaml(begun))
    assert kept_message(automatic, written) is None
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 64)
    assert with_threads(automatic, written) == begun
    message = kept_message(automatic, written)
    assert message is not None
    assert ("trainers=2 engines=8" in message, "trainers=16 engines=64" in message) == (True, True)
    assert kept_message(automatic, {}) is None
    assert kept_message(load(DEBUG, ["cluster.threads_per_device=5"]), written) is None
    asked = load(DEBUG, ["cluster.threads_per_device={trainers: null, engines: 3}"])
    assert with_threads(asked, written).cluster.threads_per_device == Threads(trainers=2, engines=3)
    del written["cluster"]["threads_per_device"]
    assert with_threads(automatic, written).cluster.threads_per_device == Threads()
    on_gpus = load(DEBUG, [AUTO, "cluster.device=cuda"])
    assert with_threads(on_gpus, {}).cluster.threads_per_device == Threads(), "nothing is divided"


def test_one_thread_is_the_default_and_a_number_sets_both_kinds() -> None:
    config = load(DEBUG)
    assert with_threads(config, {}) is config
    assert config.cluster.threads_per_device == Threads(trainers=1, engines=1)
    assert load(DEBUG, ["cluster.threads_per_device=3"]).cluster.threads_per_device == Threads(trainers=3, engines=3)
    for wrong in ("0", "many", "true", "[1]"):
        with pytest.raises(ConfigError, match=r"cluster.threads_per_device = .*\n    rule: should be auto, a number"):
            load(DEBUG, [f"cluster.threads_per_device={wrong}"])


def test_cores_are_those_in_the_process_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(cpu_threads, "_CGROUP", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    for text, cores in (("max 100000", 12), ("450000 100000", 4), ("50000 100000", 1), ("9900000 100000", 12)):
        quota.write_text(f"{text}\n")
        assert usable_cores() == cores
    quota.unlink()
    assert usable_cores() == 12


@pytest.mark.process
async def test_processes_get_their_threads(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = load(DEBUG, ["cluster.threads_per_device={trainers: 2, engines: 3}"]).cluster
    monkeypatch.setattr(session, "_cluster", cluster)
    trainer = session.launch("train rank 0", partial(FakeWorker, None, "train", 0), [0])
    scorer = session.launch("scorer 0", partial(FakeWorker, None, "scorers", 0))
    engine = session.launch("engine", partial(FakeStepper), [0])
    workers = WorkerGroup(session, "train", [trainer, scorer])
    assert await workers.call(FakeWorker.tell, lambda: os.environ["OMP_NUM_THREADS"]) == ["2", "1"]
    assert await workers.call(FakeWorker.tell, lambda: os.environ.get("OMP_WAIT_POLICY")) == ["PASSIVE", None]
    engines = WorkerGroup(session, "rollout", [engine])
    assert await engines.call(FakeStepper.tell, lambda: os.environ["OMP_NUM_THREADS"]) == ["3"]
    for process in (trainer, scorer, engine):
        session.end(process)
