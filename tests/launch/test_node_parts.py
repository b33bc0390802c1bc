"""The parts of the node agent: environment, ports, processes and the job directory."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.launch.node.agent import AgentOptions, token_of
from megarl.launch.node.head import Head
from megarl.launch.node.job_directory import JobDirectory, JobEnded
from megarl.launch.node.logged_process import LoggedProcess
from megarl.launch.node.network import PortBlock, address_of, head_address, interface_of, port_blocks
from megarl.launch.node.slurm_job import SlurmJob, clean_env, expand_nodelist, missing_gpus
from tests.leftovers import comes_true

pytestmark = pytest.mark.process

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[03,01],big",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.3",
}


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1 n2"),
        ("gpu-a[08-11,2],login", "gpu-a08 gpu-a09 gpu-a10 gpu-a11 gpu-a2 login"),
        ("r[1-2]c[1-2]", "r1c1 r1c2 r2c1 r2c2"),
        ("n[7-8]-ib,a.b[1]", "n7-ib n8-ib a.b1"),
    ],
)
def test_node_lists_are_expanded(nodelist: str, names: str) -> None:
    assert list(expand_nodelist(nodelist)) == names.split()


def test_a_task_reads_its_rank_and_nodes() -> None:
    job = SlurmJob.of(STEP)
    assert (job.id, job.attempt, job.index, job.name) == (4711, 0, 1, "gpu01")
    assert job.nodes == ("gpu03", "gpu01", "big")
    assert (job.launcher, job.step) == ("10.0.0.3", "0")
    assert SlurmJob.of({**STEP, "SLURM_RESTART_COUNT": "2"}).attempt == 2


def test_a_process_outside_of_a_job_step_gets_instructions() -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST is not set.*srun --ntasks-per-node=1"):
        SlurmJob.of({"SLURM_JOB_ID": "1"})
    with pytest.raises(ValueError, match=r"6 tasks on 3 nodes: .*--ntasks-per-node=1"):
        SlurmJob.of({**STEP, "SLURM_NTASKS": "6"})


@pytest.mark.parametrize("token", [{}, {"RAY_AUTH_TOKEN": ""}, {"RAY_AUTH_TOKEN": "secret"}])
def test_a_missing_or_short_token_is_refused_with_a_fix_that_works(token: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="RAY_AUTH_TOKEN must be a secret") as refused:
        token_of(token)
    fix = str(refused.value).partition("export ")[2]
    made = subprocess.run(["sh", "-c", f"export {fix}; printenv RAY_AUTH_TOKEN"], capture_output=True, text=True)
    assert len(made.stdout.strip()) == 64
    assert token_of({"RAY_AUTH_TOKEN": made.stdout.strip()}) == made.stdout.strip()


def test_misleading_variables_are_removed() -> None:
    kept = {"PATH", "HF_HOME", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "RANKING"}
    misleading = {
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID_HET_GROUP_0", "SLURM_CONF", "SRUN_DEBUG"),
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        *("PMI_RANK", "PMIX_RANK", "PMI2_X", "OMPI_COMM_WORLD_RANK", "I_MPI_PMI_LIBRARY", "MPI_LOCALRANKID", "HYDI_X"),
        *("RAY_ADDRESS", "RAY_JOB_ID"),
    }
    assert set(clean_env(dict.fromkeys(kept | misleading, "x"))) == kept


@given(st.integers(min_value=1, max_value=2**31))
def test_ports_are_below_the_ephemeral_range(job: int) -> None:
    blocks = port_blocks(job)
    assert len({block[0] for block in blocks}) == len(blocks)
    for block in blocks:
        assert len(block) == 100
        assert block[0] >= 10000
        assert block[-1] < 32768
    neighbours = {port_blocks(job + near)[0][0] for near in range(1, 17)}
    assert not {block[0] for block in blocks} & neighbours


def test_a_port_block_is_exclusive_and_skipped_if_a_port_is_in_use() -> None:
    blocks = port_blocks(190)
    first = PortBlock(blocks)
    second = PortBlock(blocks)
    taken = [blocks[0], blocks[1]]
    assert first.ports == blocks[0][1:]
    assert second.ports == blocks[1][1:]
    first.close()
    with socket.create_server(("127.0.0.1", first.ports[2])):
        third = PortBlock([*taken, *blocks])
        assert third.ports not in (first.ports, second.ports)
        ranges = rf"taken: {taken[0][0]}-{taken[0][10]}, {taken[1][0]}-{taken[1][10]}"
        with pytest.raises(OSError, match=ranges):
            PortBlock(taken)
    again = PortBlock(taken)
    for block in (second, third, again):
        block.close()


@pytest.mark.parametrize(
    ("nodes", "launcher", "address"),
    [
        ("n1", None, "127.0.0.1"),
        ("n1 127.0.0.1", None, "127.0.0.1"),
        ("n1 127.0.0.1", "203.0.113.9", "127.0.0.1"),  # srun ran elsewhere
        ("n1 nowhere.invalid", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_head_has_the_address_that_others_reach(nodes: str, launcher: str | None, address: str) -> None:
    step = {**STEP, "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": nodes.replace(" ", ",")}
    job = SlurmJob.of({**step, "SLURM_NTASKS": str(len(nodes.split()))})
    assert head_address(replace(job, launcher=launcher)) == address


def test_a_head_without_a_resolvable_address_is_reported() -> None:
    job = SlurmJob.of({**STEP, "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "a,nowhere.invalid,b"})
    with pytest.raises(OSError, match="not known"):
        head_address(replace(job, launcher="203.0.113.9"))


def test_interfaces_are_found_by_name_and_by_address() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    with pytest.raises(ValueError, match=r"--interface ib7 is none of .*: .*lo \(127.0.0.1\)"):
        address_of("ib7")


@pytest.mark.parametrize(
    ("visible", "files", "lack"),
    [
        ("0,1", [], None),
        ("GPU-a,GPU-b,GPU-c", [], None),
        ("3", [], "it has 1, as CUDA_VISIBLE_DEVICES=3, and cluster.devices_per_node is 2"),
        ("", ["nvidia0", "nvidia1"], "it has 0, as CUDA_VISIBLE_DEVICES="),
        ("NoDevFiles", ["nvidia0", "nvidia1"], "it has 0, as"),
        (None, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], None),
        (None, ["nvidia0", "nvidiactl", "nvidia-uvm"], "it has 1 in"),
    ],
)
def test_a_node_without_enough_gpus_is_reported(
    visible: str | None, files: list[str], lack: str | None, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    told = missing_gpus(2, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path)
    if lack is None:
        assert told is None
    else:
        assert told is not None
        assert told.startswith(lack)
        assert told.endswith("request them, as with --gpus-per-node=2")


def test_the_job_directory_records_the_job(tmp_path: Path) -> None:
    directory = JobDirectory(str(tmp_path / "a run"), SlurmJob.of(STEP))
    assert directory.path == tmp_path / "a run" / "slurm" / "4711-0"
    assert [directory.log(index).name for index in (0, 2)] == ["head.log", "worker-2.log"]
    directory.reached("agent started", 12.5)
    directory.reached("Ray ready")
    stages = [json.loads(line) for line in (directory.path / "times.jsonl").read_text().splitlines()]
    assert [stage["stage"] for stage in stages] == ["agent started", "Ray ready"]
    assert stages[0]["time"] == 12.5 < stages[1]["time"]
    outcome = JobEnded(1, "node big was lost: gone", "big")
    directory.write_end(outcome)
    written = json.loads((directory.path / "end.json").read_text())
    assert written == {"exit_code": 1, "reason": "node big was lost: gone", "node": "big"}


def test_nodes_communicate_through_the_job_directory(tmp_path: Path) -> None:
    directory = JobDirectory(str(tmp_path), SlurmJob.of(STEP))
    assert (directory.ray_address(), directory.missing(), directory.end()) == (None, [0, 1, 2], None)
    directory.begin()
    assert directory.ray_address() == ""
    directory.log(2).touch()
    assert directory.missing() == [0, 1]
    directory.publish_ray("10.0.0.3:14702")
    assert directory.ray_address() == "10.0.0.3:14702"
    lost = JobEnded(1, "node big was lost: gone", "big")
    directory.write_end(lost)
    read = directory.end()
    assert read is not None
    assert (asdict(read), str(read)) == (asdict(lost), "node big was lost: gone")
    assert len({read, lost}) == 2


@pytest.mark.parametrize(
    ("told", "kept"), [("node gpu01 got SIGTERM", "node gpu03 got SIGTERM"), ("node gpu01 was lost", None)]
)
def test_a_signal_to_the_whole_job_is_not_that_of_the_node_that_got_it_first(
    tmp_path: Path, told: str, kept: str | None
) -> None:
    """The first node gets it while it already cleans up."""
    job = SlurmJob.of({**STEP, "SLURM_NODEID": "0"})
    own = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    options = AgentOptions(command="train", config="", overrides=(), interface=None, start_limit_s=1)
    head = Head(job, options, "x" * 16)
    head.directory = JobDirectory(str(tmp_path), job)
    head._guard = cast(Any, SimpleNamespace(finish=lambda failed: signal.raise_signal(signal.SIGTERM) is None))
    reason = JobEnded(1 if kept is None else 143, told, "gpu01")
    try:
        assert head._end(reason) == reason.exit_code
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)
    end = head.directory.end()
    assert end is not None
    assert asdict(end) == asdict(reason if kept is None else JobEnded(143, kept))


def test_an_earlier_step_of_a_job_has_not_ended_this_one(tmp_path: Path) -> None:
    directory = JobDirectory(str(tmp_path), SlurmJob.of(STEP))
    directory.begin()
    directory.publish_ray("10.0.0.3:14702")
    directory.write_end(JobEnded(1, "node big was lost: gone", "big"))
    later = JobDirectory(str(tmp_path), SlurmJob.of({**STEP, "SLURM_STEP_ID": "1"}))
    assert later.ray_address() is None
    later.begin()
    assert (later.ray_address(), later.end()) == ("", None)


def ended(child: LoggedProcess) -> int:
    """Its exit code; waits for it."""
    assert comes_true(lambda: child.exit_code is not None)
    assert child.exit_code is not None
    return child.exit_code


def test_a_child_has_ended_even_if_its_output_is_held_open(tmp_path: Path) -> None:
    child = LoggedProcess(["bash", "-c", "sleep 60 & echo $!; exit 3"], os.environ, tmp_path / "log")
    assert ended(child) == 3
    os.kill(int(child.last_message), signal.SIGKILL)
    assert (tmp_path / "log").read_text() == f"{child.last_message}\n"


def test_a_child_that_is_stopped_has_the_signal_as_its_exit_code(tmp_path: Path) -> None:
    child = LoggedProcess(["sleep", "60"], os.environ, tmp_path / "log")
    assert child.exit_code is None
    child.stop(grace_s=30)
    assert child.exit_code == 143
    stubborn = LoggedProcess(
        ["bash", "-c", "trap '' TERM; echo there; while :; do sleep 1; done"], os.environ, tmp_path / "log"
    )
    assert comes_true(lambda: stubborn.output == "there")
    stubborn.stop(grace_s=0.1)
    assert stubborn.exit_code == 137


def test_a_log_that_cannot_be_written_does_not_stop_a_child(tmp_path: Path) -> None:
    much = "import sys; sys.stdout.write('x' * 10**6); print(); print('done')"
    child = LoggedProcess([sys.executable, "-c", much], os.environ, tmp_path / "nowhere" / "log")
    assert ended(child) == 0
    assert child.last_message == "done"


def test_failed_writes_to_the_job_directory_do_not_end_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = JobDirectory(str(tmp_path), SlurmJob.of(STEP))
    directory.path.rmdir()
    directory.reached("Ray ready")
    directory.write_end(JobEnded(0, "finished"))
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == ["not written"] * 2


def test_a_dropped_childs_output_is_read_to_the_end(tmp_path: Path) -> None:
    LoggedProcess(["bash", "-c", "sleep 0.5; echo late"], os.environ, tmp_path / "log")
    gc.collect()
    assert comes_true(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "late\n")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "step 1\nrun.yaml: 1 problem\n  run.dir = x\n    fix:  y\n",
            "run.yaml: 1 problem\n  run.dir = x\n    fix:  y",
        ),
        ("Traceback:\n  File\n\nValueError: no\n\n", "ValueError: no"),
        ("  indented", "  indented"),
        ("", ""),
    ],
)
def test_the_last_message_of_a_child_is_its_last_line_or_error_block(tmp_path: Path, output: str, message: str) -> None:
    child = LoggedProcess(["printf", "%s", output], os.environ, tmp_path / "log")
    ended(child)
    assert child.last_message == message
