"""What an experiment asks of this machine and of the installed NeMo-Run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile

from nemo_run.config import get_nemorun_home

from launchers import scripts
from launchers.experiment import Task
from megarl.config import Problem
from megarl.launch.profile import SSH, Profile, Pyxis
from megarl.launch.render import Job

_MOUNTED = "/nemo_run"
"""Where NeMo-Run mounts the directory of a task, and what it replaces everywhere in a job without a container."""
_WITHOUT_PYXIS = (0, 9)
"""NeMo-Run from this version on leaves the options of Pyxis out where there is no container."""
_ENVIRONMENT = Path(".venv/bin/python")
"""The interpreter that make setup gives the project."""
_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None and 'it has no torch')"


def problems(job: Job, tasks: Sequence[Task], *, here: bool) -> Iterator[Problem]:
    """What keeps an experiment from running as it is asked for.

    Args:
        job: of the first run.
        tasks: of the experiment.
        here: on this machine.
    """
    home, profile = get_nemorun_home(), job.profile
    seen = here or not isinstance(profile.nemo_run.tunnel, SSH)
    fix = f"give --python {_ENVIRONMENT}" if seen and _ENVIRONMENT.exists() else "name that of another environment"
    yield from _unwritable(Path(home))
    yield from _not_run_by(job, fix, here=here)
    if not here:
        yield from _unable(profile)
        yield from _mistaken(home, profile, tasks)


def _unwritable(home: Path) -> Iterator[Problem]:
    """That NeMo-Run cannot write its own directory, or make it."""
    there = next(path for path in (home, *home.parents) if os.path.exists(path))
    try:
        TemporaryFile(dir=there).close()
    except OSError as error:
        rule, fix = f"can be written ({error.strerror})", "set it to a directory that you can write"
        yield Problem(field="NEMORUN_HOME", value=str(home), rule=rule, fix=fix)


def _not_run_by(job: Job, fix: str, *, here: bool) -> Iterator[Problem]:
    """That the interpreter has not what megarl needs; another one is on the nodes, or what the setup makes of it."""
    python = scripts.interpreter(job) if here else job.python
    if python != sys.executable and (not here or job.profile.setup):
        return
    why = _broken(python, job.profile.env)
    if why:
        yield Problem(field="--python", value=python, rule=f"an interpreter that can run megarl; {why}", fix=fix)


def _broken(python: str, env: Mapping[str, str]) -> str:
    """Why an interpreter cannot run megarl; empty where it can."""
    command = [python, "-c", _HAS_TORCH]
    try:
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"it cannot be started ({error.strerror})"
    return " ".join(done.stderr.split()) or f"it ends with {done.returncode}" if done.returncode else ""


def _unable(profile: Profile) -> Iterator[Problem]:
    """What the installed NeMo-Run cannot do."""
    runtime, installed = profile.runtime, version("nemo-run")
    if not isinstance(runtime, Pyxis) and tuple(map(int, installed.split(".")[:2])) < _WITHOUT_PYXIS:
        rule = f"pyxis: NeMo-Run {installed} always gives srun options of Pyxis"
        fix = "use the newest NeMo-Run, in an environment of its own (make nemo-run), or megarl launch slurm"
        yield Problem(field="runtime", value=runtime.name, rule=rule, fix=fix)


def _mistaken(home: str, profile: Profile, tasks: Sequence[Task]) -> Iterator[Problem]:
    """What NeMo-Run would make something else of, without a word."""
    if re.search(r"[\s,]", home):
        rule, fix = "without spaces and commas, which NeMo-Run does not quote", "choose another directory"
        yield Problem(field="NEMORUN_HOME", value=repr(home), rule=rule, fix=fix)
    if isinstance(profile.runtime, Pyxis):
        return
    for name, text in {"NEMORUN_HOME": home, **{task.name: f"{task.script}{task.executor}" for task in tasks}}.items():
        found = re.search(rf"\S*{_MOUNTED}\S*", text)
        if found:
            rule = f"nowhere {_MOUNTED}: NeMo-Run puts the directory of the task in its place"
            yield Problem(field=name, value=found.group(), rule=rule, fix="choose other names of directories")
