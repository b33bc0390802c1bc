"""``megarl launch ray``: a run as a job of a running Ray cluster."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from zipfile import ZIP_DEFLATED, ZipFile

import typer

from megarl.config import ConfigError, EvalConfig, Problem, RunConfig, load, save
from megarl.errors import PreemptedError
from megarl.launch.checker import is_not_finished, load_checked
from megarl.launch.request import submitted_as, unwritable
from megarl.run.status.jobs import record_submission

_PACKED_CONFIG = "megarl-run.yaml"
_LARGEST_MIB, _MIB = 100, 1 << 20
_NAMED = 3


def launch(
    config_path: Path,
    overrides: Sequence[str],
    *,
    address: str,
    working_dir: Path | None = None,
    python: str | None = None,
    wait: bool = True,
    resumes: int = 0,
) -> int:
    """Submits a run to the cluster at a dashboard's address; follows it, if `wait`, and returns its exit code.

    The job starts the run again after exit code 75, up to `resumes` times.

    Without ``working_dir`` the job runs in the current directory, which the nodes must see, and the resolved
    configuration is written to run.dir. With it, a package of both is sent to the cluster.

    Raises:
        ConfigError: The configuration, the address or the directory is invalid.
        RunError: There is no such cluster, it has too few devices, or the job is lost.
    """
    _check_address(address)
    config = _load(config_path, [*overrides, "cluster.address=auto"], working_dir)
    from megarl.cluster.ray_jobs import RayJobs

    jobs = RayJobs(address)
    jobs.check(config.cluster)
    name = f"megarl-{re.sub(r'[^A-Za-z0-9.-]', '-', Path(config.run.dir).name)}-{secrets.token_hex(4)}"
    command = [python or sys.executable, "-m", "megarl", "eval" if isinstance(config, EvalConfig) else "train"]
    if working_dir is None:
        written = submitted_as(config, "ray").absolute()
        try:
            written.parent.mkdir(parents=True, exist_ok=True)
            save(config, written)
        except OSError as error:
            raise ConfigError([unwritable(config.run.dir, error)], "command line") from None
        here = shlex.join(["cd", os.getcwd()])
        jobs.submit(name, f"{here} || exit; {resuming([*command, str(written)], resumes)}", None)
        record_submission(written.parent, name)
    else:
        command[0] = python or "python"
        with packed(working_dir, config) as package:
            jobs.submit(name, resuming([*command, _PACKED_CONFIG], resumes), package)
    typer.echo(
        f"submitted {name} to {jobs.address}\n"
        f"  run directory  {Path(config.run.dir).absolute()} (the head and all nodes must see it under this path)\n"
        f"  follow         ray job logs {name} --address {jobs.address} --follow\n"
        f"  stop           ray job stop {name} --address {jobs.address}"
    )
    return jobs.follow(name, partial(print, end="", flush=True)) if wait else 0


def resuming(command: Sequence[str], resumes: int) -> str:
    """Returns shell that runs a command again after exit code 75, unless the job is stopped."""
    again = f'code=$?; [ "$code" -eq {PreemptedError.exit_code} ] && [ "$left" -gt 0 ]'
    loop = f"while {shlex.join(command)}; {again}; do left=$((left - 1)); done"
    return f'left={resumes}; trap left=0 TERM; {loop}; exit "$code"'


def _load(path: Path, overrides: Sequence[str], working_dir: Path | None) -> RunConfig:
    """Returns the checked configuration; with a working directory, missing files may be on the cluster."""
    from megarl.preflight.check import check

    if working_dir is None:
        config = load_checked(path, overrides, check)
        if finished := list(is_not_finished(config)):
            raise ConfigError(finished, str(path))
        return config
    path = path.absolute()
    if not working_dir.is_dir():
        raise _wrong("--working-dir", str(working_dir), "a directory", "correct the path")
    with contextlib.chdir(working_dir):
        config = load(path, overrides, pending_paths=[Path("/")])
    if not Path(config.run.dir).is_absolute():
        rule = "an absolute path that all nodes of the cluster see: the copy of --working-dir is temporary"
        raise _wrong("run.dir", config.run.dir, rule, "name a directory of the shared file system")
    return config


@contextlib.contextmanager
def packed(directory: Path, config: RunConfig) -> Iterator[Path]:
    """Yields a zip file of a directory, without hidden files and caches, and of the resolved configuration."""
    files: list[Path] = []
    for place, below, names in os.walk(directory):
        below[:] = sorted(name for name in below if not name.startswith(".") and name != "__pycache__")
        files += (Path(place, name) for name in sorted(names) if not name.startswith("."))
    sizes: dict[str, int] = {}
    for file in files:
        entry = file.relative_to(directory).parts[0]
        sizes[entry] = sizes.get(entry, 0) + file.stat().st_size
    if sum(sizes.values()) > _LARGEST_MIB * _MIB:
        largest = sorted(sizes, key=lambda entry: -sizes[entry])[:_NAMED]
        value = f"{directory} ({', '.join(f'{entry}: {sizes[entry] / _MIB:,.0f} MiB' for entry in largest)})"
        fix = "send a directory with your functions and small files; put models and data where all nodes see them"
        raise _wrong("--working-dir", value, f"at most {_LARGEST_MIB} MiB", fix)
    with tempfile.TemporaryDirectory() as temporary:
        package, resolved = Path(temporary, "package.zip"), Path(temporary, _PACKED_CONFIG)
        save(config, resolved)
        with ZipFile(package, "w", ZIP_DEFLATED, strict_timestamps=False) as archive:
            for file in files:
                archive.write(file, file.relative_to(directory))
            archive.write(resolved, _PACKED_CONFIG)
        yield package


def _check_address(address: str) -> None:
    try:
        place = urlsplit(address)
        usable = place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
    except ValueError:  # of a port, or of brackets
        usable = False
    if not usable:
        rule = "the address of the dashboard of the cluster's head"
        raise _wrong("--address", address, rule, "write it as http://HEAD:8265")


def _wrong(field: str, value: str, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem(field=field, value=value, rule=rule, fix=fix)], "command line")
