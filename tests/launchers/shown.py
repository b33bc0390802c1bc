"""Output of the scripts with --dry-run, kept as golden files; `python -m tests.launchers.shown` rewrites them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.launchers.scripts import ROOT, user

GOLDEN = Path(__file__).parent / "golden"
PIPELINE = ("pipeline", "configs/debug/sft.yaml", "configs/debug/reward_model.yaml")
SFT = ("ppo", "configs/debug/sft.yaml")
_CLUSTER = """\
partition: batch
account: research
time: "04:00:00"
"""
_PYXIS = _CLUSTER + "runtime: {name: pyxis, image: /images/megarl.sqsh, mounts: [/data, '/scratch/me:/scratch']}\n"
_ALL = """\
qos: high
reservation: spring
constraint: nvlink&ib
gpu_type: h100
cpus_per_task: 96
sbatch: [--mail-type=FAIL, "--comment=it's a \\"test\\"", --spread-job]
srun: [--mpi=none]
env: {HF_HOME: /data/hf cache, Greeting: it's "two" words and $HOME}
setup: [module load python/3.12, 'export DATA="$HOME/data"']
interface: ib0
"""
_APPTAINER = """\
runtime: {name: apptainer, image: /images/megarl.sif, mounts: [/data], options: [--writable-tmpfs]}
env: {HF_HOME: /data/hf cache}
"""
_BARE = _CLUSTER + "runtime: {name: bare, python: /shared/me/venv/bin/python}\n"
_SSH = (
    _BARE
    + """\
nemo_run: {tunnel: {host: login.cluster, user: me, job_dir: /shared/me/experiments, directory: /shared/me/megarl}}
"""
)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A call of a script, with the text of a profile, whose output is kept."""

    profile: str
    call: tuple[str, ...]

    def output(self) -> str:
        """The script's output without configurations and without what differs from call to call."""
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "profile.yaml").write_text(self.profile, encoding="utf-8")
            script, *arguments = self.call
            options = ("--executor", "slurm", "--dry-run", "--profile", f"{directory}/profile.yaml", "--name", "demo")
            done = user(Path(directory)).call(script, *arguments, *options)
            assert done.returncode == 0, done.stderr
            left = {file.name for file in Path(directory).iterdir()}
            assert left == {"profile.yaml"}, f"a dry run leaves nothing: {left}"
        text = done.stdout.replace(directory, "/home/me").replace(str(ROOT), "/home/me/megarl")
        text = re.sub(r"config-[0-9a-f]{8}", "config-0123abcd", re.sub(r"demo_\d+", "demo_0", text))
        return re.sub(r"(<< '(END .*)'\n)(?s:.*?)\n(\2)", r"\1(the configuration)\n\3", text)


SHOWN: Mapping[str, Shown] = {
    "pyxis": Shown(profile=_PYXIS + _ALL, call=(*SFT, "cluster.device=cuda")),
    "bare": Shown(profile=_BARE, call=PIPELINE),
    "apptainer": Shown(profile=_APPTAINER, call=(*SFT, "cluster.device=cuda")),
    "ssh": Shown(profile=_SSH, call=PIPELINE),
}

if __name__ == "__main__":
    for name, shown in SHOWN.items():
        (GOLDEN / f"{name}.txt").write_text(shown.output(), encoding="utf-8")
