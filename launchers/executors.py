"""NeMo-Run's executors and the scripts of its tasks, from the profile of ``megarl launch slurm``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import nemo_run as run

from megarl.config import RunConfig, as_yaml
from megarl.launch.profile import SSH, Bare, Pyxis
from megarl.launch.render import BatchJob, templates

_END = "END OF THE CONFIGURATION"


def slurm(job: BatchJob, config: RunConfig, *, title: str) -> run.SlurmExecutor:
    """Returns the executor of a cluster."""
    profile = job.profile
    ssh = profile.nemo_run.tunnel
    tunnel = run.LocalTunnel(job_dir="")
    if isinstance(ssh, SSH):
        tunnel = run.SSHTunnel(host=ssh.host, user=ssh.user, job_dir=ssh.job_dir, identity=ssh.identity)
    optional: dict[str, Any] = {"account": profile.account, "time": profile.time}
    if isinstance(profile.runtime, Pyxis):
        optional["container_image"] = profile.runtime.image
        optional["container_mounts"] = list(job.mounts)
        optional["container_env"] = list(profile.env)
    mem = profile.mem
    if mem is None and profile.exclusive:
        mem = "0"
    return run.SlurmExecutor(
        qos=profile.qos,
        constraint=profile.constraint,
        cpus_per_task=profile.cpus_per_task,
        partition=profile.partition,
        nodes=job.nodes,
        ntasks_per_node=1,
        mem=mem,
        exclusive=profile.exclusive or None,
        signal=f"USR1@{profile.grace}" if profile.grace else None,
        additional_parameters=_sbatch(job),
        **optional,
        # These come after NeMo-Run's own options and override two that would kill the nodes before they clean up.
        srun_args=list(job.srun),
        # Not env_vars: NeMo-Run writes their names in capitals and their values without quotes.
        setup_lines=render("setup.sh.j2", job=job, config=as_yaml(config), end=_END),
        dependency_type="afterok",
        job_name_prefix=f"{title}.",
        tunnel=tunnel,
        packager=run.Packager(),
        poll_estimated_start_time=False,  # where squeue fails, that prints that the job is no longer pending
    )


def _sbatch(job: BatchJob) -> dict[str, str | bool]:
    """Returns the options of sbatch for which the executor has no field, or one without types of GPUs."""
    profile = job.profile
    # A job whose dependency failed is removed; NeMo-Run would wait for it forever.
    given = [*job.gpu_options, "--kill-on-invalid-dep=yes"]
    if profile.reservation:
        given.append(f"--reservation={profile.reservation}")
    options: dict[str, str | bool] = {}
    for option in (*given, *profile.sbatch):
        name, equals, value = option.removeprefix("--").partition("=")
        options[name.replace("-", "_")] = value if equals else True
    return options


def local_script(job: BatchJob, config: RunConfig, *, name: str, after: Sequence[str]) -> str:
    """Returns the script of a local task, which runs only if the tasks in `after` have succeeded."""
    return render(
        "local.sh.j2",
        job=job,
        config=as_yaml(config),
        name=name,
        after=after,
        end=_END,
        python=local_python(job),
    )


def local_python(job: BatchJob) -> str:
    """Returns the interpreter of local runs, which do not use the profile's container."""
    return job.python if isinstance(job.profile.runtime, Bare) else sys.executable


def render(template: str, /, *, job: BatchJob, **values: object) -> str:
    """Renders a script from a template."""
    mask = os.umask(0o077)
    os.umask(mask)
    profile = job.profile
    found = templates(jinja2.FileSystemLoader(Path(__file__).parent / "templates")).get_template(template)
    return found.render(job=job, profile=profile, runtime=profile.runtime, umask=f"{mask:04o}", **values)
