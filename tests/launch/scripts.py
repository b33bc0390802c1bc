"""Jobs whose scripts are kept as golden files; `python -m tests.launch.scripts` rewrites the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.launch.profile import Profile
from megarl.launch.render import BatchJob, render

GOLDEN = Path(__file__).parent / "golden"

_CLUSTER = {"partition": "batch", "account": "lab", "time": "04:00:00"}


def job(profile: Mapping[str, Any], **changes: Any) -> BatchJob:
    """A job on two nodes of eight GPUs."""
    usual: dict[str, Any] = {
        "title": "ppo in runs/first",
        "name": "first",
        "command": "train",
        "workdir": Path("/home/me/work"),
        "run_dir": Path("/home/me/work/runs/first"),
        "nodes": 2,
        "gpus": 8,
    }
    made = {**usual, **changes}
    config = made["run_dir"] / "slurm" / "config-0123abcd.yaml"
    whole = {"runtime": {"python": "/home/me/venv/bin/python"}, **_CLUSTER, **profile}
    return BatchJob(**made, config=config, profile=Profile.model_validate(whole))


JOBS: Mapping[str, BatchJob] = {
    "bare": job({}),
    "module": job(
        {
            "runtime": {"python": "python"},
            "setup": ["module load python/3.12", 'source "$HOME/venv/bin/activate"'],
            "env": {"HF_HOME": "/data/hf cache", "NCCL_DEBUG": "WARN"},
            "gpu_request": "gres",
            "gpu_type": "h100",
            "exclusive": False,
            "cpus_per_task": 64,
            "mem": "500G",
            "qos": "high",
            "reservation": "launch",
            "constraint": "nvlink&ib",
            "interface": "ib0",
            "start_limit": 900,
            "grace": 0,
            "requeue": False,
            "sbatch": ["--comment=two words", "--mail-type=FAIL"],
            "srun": ["--mpi=none"],
        }
    ),
    "cpu": job(
        {"account": None, "partition": None},
        title="eval in runs/first",
        nodes=1,
        gpus=0,
        command="eval",
    ),
    "pyxis": job(
        {
            "runtime": {"name": "pyxis", "image": "registry.example#team/megarl:1", "mounts": ["/data", "/models:/m"]},
            "env": {"HF_HOME": "/data/hf", "HF_HUB_OFFLINE": 1},
        }
    ),
    "apptainer": job(
        {
            "runtime": {
                "name": "apptainer",
                "image": "/images/megarl.sif",
                "mounts": ["/data"],
                "options": ["--writable-tmpfs"],
                "python": "/opt/venv/bin/python",
            },
            "env": {"HF_HOME": "/data/hf"},
        },
        title="ppo in /scratch/me/first",
        run_dir=Path("/scratch/me/first"),
    ),
    "chain": job(
        {},
        title="ppo in runs/ppo",
        name="ppo",
        run_dir=Path("/home/me/work/runs/ppo"),
        dependent=True,
        earlier=(Path("/home/me/work/runs/first"),),
    ),
}

if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, each in JOBS.items():
        (GOLDEN / f"{name}.sbatch").write_text(render(each), encoding="utf-8")
