"""NeMo-Run's executors and the scripts of its tasks, from the profile of ``megarl launch slurm``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jinja2
import nemo_run as run

from megarl.config import RunConfig, as_yaml
from megarl.launch.profile import SSH, Bare, Pyxis
from megarl.launch.render import BatchJob, templates

_END = "END OF THE CONFIGURATION"


def slurm(job: BatchJob, config: RunConfig, *, title: str) -> run.SlurmExecutor:
    """Returns the executor of a cluster."""
    profile = job.profile
    place = profile.nemo_run.tunnel
    tunnel = run.LocalTunnel(job_dir="")
    if isinstance(place, SSH):
        tunnel = run.SSHTunnel(host=place.host, user=place.user, job_dir=place.job_dir, identity=place.identity)
    pyxis = profile.runtime if isinstance(profile.runtime, Pyxis) else None
    return run.SlurmExecutor(
        **{name: getattr(profile, name) for name in ("account", "qos", "constraint", "time", "cpus_per_task")},
        partition=job.partition,
        nodes=job.nodes,
        ntasks_per_node=1,
        mem=profile.mem or ("0" if profile.exclusive else None),
        exclusive=profile.exclusive or None,
        signal=f"USR1@{profile.grace}" if profile.grace else None,
        additional_parameters=dict(_sbatch(job)),
        container_image=pyxis and pyxis.image,
        container_mounts=list(job.mounts) if pyxis else [],
        container_env=list(profile.env) if pyxis else None,
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


def _sbatch(job: BatchJob) -> Iterator[tuple[str, str | bool]]:
    """Yields the options of sbatch for which the executor has no field, or one without types of GPUs."""
    profile = job.profile
    count = job.gpus
    gpus = f"{profile.gpu_type}:{count}" if profile.gpu_type else str(count)
    if count and profile.gpu_request != "none":
        yield ("gpus_per_node", gpus) if profile.gpu_request == "gpus-per-node" else ("gres", f"gpu:{gpus}")
    # A job whose dependency failed is removed; NeMo-Run would wait for it forever.
    yield "kill_on_invalid_dep", "yes"
    if profile.reservation:
        yield "reservation", profile.reservation
    for option in profile.sbatch:
        name, equals, value = option.removeprefix("--").partition("=")
        yield name.replace("-", "_"), value if equals else True


def local_script(job: BatchJob, config: RunConfig, *, name: str, after: Sequence[str]) -> str:
    """Returns the script of a local task, which runs only if the tasks in `after` have succeeded."""
    values = {"config": as_yaml(config), "name": name, "after": after, "end": _END, "python": local_python(job)}
    return render("local.sh.j2", job=job, **values)


def local_python(job: BatchJob) -> str:
    """Returns the interpreter of local runs, which do not use the profile's container."""
    return job.python if isinstance(job.profile.runtime, Bare) else sys.executable


def render(template: str, /, *, job: BatchJob, **values: object) -> str:
    """Renders a script from a template."""
    os.umask(mask := os.umask(0o077))
    own = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    known = {"job": job, "profile": job.profile, "runtime": job.profile.runtime, "umask": f"{mask:04o}"}
    return templates(own).get_template(template).render(**known, **values)
