"""NeMo-Run's executors, from the same profile of a cluster as ``megarl launch slurm``."""

from __future__ import annotations

from collections.abc import Iterator

import nemo_run as run

from launchers import scripts
from megarl.config import RunConfig
from megarl.launch.profile import SSH, Profile, Pyxis
from megarl.launch.render import Job


def local(profile: Profile) -> run.LocalExecutor:
    """This machine."""
    return run.LocalExecutor(env_vars=dict(profile.env))


def slurm(job: Job, config: RunConfig, *, title: str, anyway: bool = False) -> run.SlurmExecutor:
    """A cluster.

    Args:
        job: what is asked of it.
        config: of the run, which the job takes along.
        title: of the experiment; with the task's name it is the job's.
        anyway: what the job waits for may have failed.
    """
    profile, component = job.profile, job.components[0]
    pyxis = profile.runtime if isinstance(profile.runtime, Pyxis) else None
    return run.SlurmExecutor(
        account=profile.account,  # pyright: ignore[reportArgumentType]: None is left out, as of time
        partition=component.partition,
        qos=profile.qos,
        constraint=profile.constraint,
        time=profile.time,  # pyright: ignore[reportArgumentType]
        nodes=component.nodes,
        ntasks_per_node=1,
        cpus_per_task=profile.cpus_per_task,
        mem=profile.mem or ("0" if profile.exclusive else None),
        exclusive=profile.exclusive or None,
        signal=f"TERM@{profile.grace}" if profile.grace else None,
        additional_parameters=dict(_sbatch(job)),
        container_image=pyxis and pyxis.image,
        container_mounts=list(job.mounts) if pyxis else [],
        srun_args=list(_srun(job)),
        # Not env_vars, which NeMo-Run writes in capitals and without quotes.
        setup_lines=scripts.setup(job, config),
        dependency_type="afterany" if anyway else "afterok",
        job_name_prefix=f"{title}.",
        tunnel=_tunnel(profile),
        packager=run.Packager(),
    )


def _tunnel(profile: Profile) -> run.SSHTunnel | run.LocalTunnel:
    tunnel = profile.nemo_run.tunnel
    if isinstance(tunnel, SSH):
        return run.SSHTunnel(host=tunnel.host, user=tunnel.user, job_dir=tunnel.job_dir, identity=tunnel.identity)
    return run.LocalTunnel(job_dir="")


def _sbatch(job: Job) -> Iterator[tuple[str, str | bool]]:
    """Options of sbatch for which the executor has no field, or one without types of GPUs."""
    profile, count = job.profile, job.components[0].gpus
    gpus = f"{profile.gpu_type}:{count}" if profile.gpu_type else str(count)
    if count and profile.gpu_request != "none":
        yield ("gpus_per_node", gpus) if profile.gpu_request == "gpus-per-node" else ("gres", f"gpu:{gpus}")
    # Where the job that it waits for has failed, a job goes: NeMo-Run would wait for it for ever.
    yield "kill_on_invalid_dep", "yes"
    if profile.reservation:
        yield "reservation", profile.reservation
    for option in profile.sbatch:
        name, equals, value = option.removeprefix("--").partition("=")
        yield name.replace("-", "_"), value if equals else True


def _srun(job: Job) -> Iterator[str]:
    """Options of srun, after NeMo-Run's own, of which two would cut the nodes' orderly end short."""
    yield from job.srun
    if isinstance(job.profile.runtime, Pyxis) and job.profile.env:
        yield f"--container-env={','.join(job.profile.env)}"
