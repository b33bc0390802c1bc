"""The scripts of launchers/ as a user calls them, with a fake interpreter in place of the one with megarl."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.files import read_lines
from tests.needs import lacking

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE = ROOT / ".venv-nemo-run" / "bin" / "python"
"""The interpreter of an environment that launches runs and cannot run them."""

UMASK = 0o002
"""Of the users: what they make is for their groups, too."""

_STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
if sys.argv[1] == "-c":
    sys.exit()  # it has what it is asked for
here = pathlib.Path(__file__).parent
config = pathlib.Path(sys.argv[-1]).read_text()
stage = config.split()[1]
def told(what):
    with open(here / "calls.jsonl", "a") as record:
        record.write(json.dumps(what) + "\\n")
def end(number, frame):
    time.sleep(0.5)
    told({{"stage": stage, "ended": number}})
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, end)
os.umask(mask := os.umask(0))
call = {{"stage": stage, "arguments": sys.argv[1:], "config": config, "at": os.getcwd(), "umask": mask}}
told({{**call, "environment": dict(os.environ)}})
sys.stdout.write(f"the stand-in runs {{stage}}\\n")  # at once: two of them write to one file
sys.stdout.flush()
time.sleep(1)  # torchx may not show what is printed last
while (here / f"{{stage}}.stays").exists():
    time.sleep(0.1)
if (here / f"{{stage}}.leaves").exists() and "SLURM_RESTART_COUNT" not in os.environ:
    sys.exit(75)
sys.exit(3 if (here / f"{{stage}}.fails").exists() else 0)
"""


def torch_free() -> Path:
    """The interpreter without torch; skips a test where it is missing, which CI does not accept."""
    if not TORCH_FREE.exists():
        lacking("no environment that only launches runs: make nemo-run")
    return TORCH_FREE


@dataclass(frozen=True, kw_only=True)
class User:
    """Someone who launches experiments with the NeMo-Run of an interpreter."""

    directory: Path
    python: Path
    environment: Mapping[str, str]

    @property
    def stand_in(self) -> Path:
        """A fake interpreter: records its arguments, and does not run anything."""
        file = self.directory / "stand-in"
        if not file.exists():
            file.write_text(_STAND_IN, encoding="utf-8")
            file.chmod(0o755)
        return file

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The recorded calls, without a line that is still being written."""
        return read_lines(self.directory / "calls.jsonl")

    def let(self, stage: str, *, stay: bool = False, fail: bool = False, leave: bool = False) -> None:
        """Sets how the fake interpreter behaves as a stage."""
        for ending, wanted in (("stays", stay), ("fails", fail), ("leaves", leave)):
            file = self.directory / f"{stage}.{ending}"
            file.touch() if wanted else file.unlink(missing_ok=True)

    def command(self, script: str, *arguments: str) -> list[str]:
        """The words of a call of a script."""
        return [str(self.python), "-m", f"launchers.{script}", *arguments]

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        """Starts a script."""
        command, pipe = self.command(script, *arguments), subprocess.PIPE
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment, text=True, stdout=pipe, stderr=pipe, umask=UMASK
        )

    def call(self, script: str, *arguments: str, limit_s: float = 200) -> subprocess.CompletedProcess[str]:
        """Calls a script and waits for its end."""
        with self.start(script, *arguments) as process:
            try:
                output, errors = process.communicate(timeout=limit_s)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    @property
    def readable(self) -> list[Path]:
        """NeMo-Run's files that others can read: all directories above them in its own are open."""
        home = self.directory / "home"

        def is_open(path: Path) -> bool:
            return path == home or bool(path.stat().st_mode & 0o077 and is_open(path.parent))

        return [file for file in home.rglob("*") if file.is_file() and not file.is_symlink() and is_open(file)]

    def nemo(self, *arguments: str) -> str:
        """What NeMo-Run's own command prints."""
        command = [str(self.python.parent / "nemo"), "experiment", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr


def user(directory: Path, python: Path = Path(sys.executable), **environment: str) -> User:
    """Someone with an empty account."""
    variables = {**os.environ, **environment, "HOME": str(directory), "NEMORUN_HOME": str(directory / "home")}
    return User(directory=directory, python=python, environment=variables)
