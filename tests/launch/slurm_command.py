"""The command `megarl launch slurm` in a directory of its own, with an sbatch that records its input."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megarl.launch.cli import app
from tests.config.debug import DEBUG

_SBATCH = f"""#!{sys.executable}
import json, os, pathlib, sys
record = pathlib.Path({{record!r}})
calls = json.loads(record.read_text()) if record.exists() else []
calls.append([sys.argv[1:], dict(os.environ)])
record.write_text(json.dumps(calls))
if len(calls) == {{refused}}:
    sys.exit("sbatch: error: invalid partition specified: nowhere")
print(f"{{{{100 + len(calls)}}}};cluster")
"""


@dataclass(frozen=True, kw_only=True)
class Login:
    """A login node: runs go below `home`, and sbatch into `tools`."""

    home: Path
    tools: Path

    @property
    def record(self) -> Path:
        """What sbatch was given."""
        return self.home / "sbatch.json"

    @property
    def submitted(self) -> list[list[str]]:
        """The arguments of every call of sbatch."""
        return [arguments for arguments, _ in self.calls]

    @property
    def calls(self) -> list[tuple[list[str], dict[str, str]]]:
        """The arguments and the environment of every call of sbatch."""
        return json.loads(self.record.read_text()) if self.record.exists() else []

    def give_sbatch(self, *, refused: int = 0) -> None:
        """Puts sbatch there; of its calls, one is refused."""
        (self.tools / "sbatch").write_text(_SBATCH.format(record=str(self.record), refused=refused))
        (self.tools / "sbatch").chmod(0o755)

    def launch(self, *arguments: str) -> Result:
        """Calls megarl launch slurm."""
        return CliRunner().invoke(app, ["slurm", *arguments], catch_exceptions=False, env={"COLUMNS": "200"})

    def kept(self, run: str) -> Path:
        """The configuration that the script of a run names."""
        (named,) = re.findall(r"^config=(.*)$", (self.home / run / "slurm" / "job.sbatch").read_text(), re.MULTILINE)
        (file,) = shlex.split(named)
        return Path(file)

    def refused(self, *arguments: str) -> str:
        """The message of a refused request; nothing is written or submitted."""
        before = sorted(self.home.rglob("*"))
        result = self.launch(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert sorted(self.home.rglob("*")) == before
        return result.stderr

    def config(self, name: str, text: str = "", *, stage: str = "ppo") -> str:
        """A file on top of a stage's debug run, whose run.dir is called like it."""
        file = self.home / f"{name}.yaml"
        file.write_text(f"defaults: [{DEBUG.with_stem(stage)}]\nrun: {{dir: {self.home / name}}}\n{text}")
        return str(file)


def finish(run_dir: Path, *, stage: str = "ppo", steps: int = 3) -> None:
    """Leaves in a directory what a finished run does."""
    run_dir.mkdir(parents=True)
    (run_dir / "summary.json").write_text(json.dumps({"stage": stage, "steps": steps}))


def login_node(home: Path, monkeypatch: pytest.MonkeyPatch) -> Login:
    """A login node without Slurm's commands."""
    tools = home / "tools"
    tools.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{tools}")
    return Login(home=home, tools=tools)
