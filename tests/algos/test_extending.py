"""docs/extending.md: its policy loss is added to a copy of the package, and a configuration names it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")

TRIAL = """
import sys
from megarl.config import ConfigError, load
config = load("mine.yaml")
assert "torch" not in sys.modules
assert config.algo.policy_loss.options == {"damping": 0.5}
assert load("mine.yaml", ["algo.policy_loss=damped"]).algo.policy_loss.options == {"damping": 0.1}
try:
    load("mine.yaml", ["algo.policy_loss.damping=-1"])
except ConfigError as error:
    (problem,) = error.problems
    assert problem.field == "algo.policy_loss.damping" and "Weight of the penalty." in problem.fix, error

import torch
from megarl.algos.registry import POLICY_LOSSES, bound
from tools.docs import algorithms_page, configuration_page

chosen = config.algo.policy_loss
loss = bound(POLICY_LOSSES, chosen.name, chosen.options)
new, old = torch.tensor([[0.5, 9.0]]), torch.zeros(1, 2)
print(loss(new, old, torch.full((1, 2), 2.0), torch.tensor([[True, False]])).values[0, 0].item())
assert "| | `damping` | float | `0.1` | Weight of the penalty. |" in configuration_page.markdown()
assert "### `damped`\\n\\nOptions: `damping` = 0.1." in algorithms_page.markdown()
"""


@pytest.mark.process
def test_the_documented_policy_loss_is_one_function_and_one_line(tmp_path: Path) -> None:
    (section,) = re.findall(r"^## Add a policy loss$(.*?)^## ", PAGE, flags=re.DOTALL | re.MULTILINE)
    function, settings = re.findall(r"```(?:python|yaml)\n(.*?)```", section, flags=re.DOTALL)
    assert len(function.splitlines()) <= 19
    (line,) = re.findall(r"registry\.py`: `(.*)`$", section, flags=re.MULTILINE)
    for folder in ("megarl", "tools", "configs"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    losses, registry = (tmp_path / "megarl" / "algos" / name for name in ("policy_loss.py", "registry.py"))
    losses.write_text(f"{losses.read_text()}\n\n{function}")
    before, table, after = registry.read_text().partition("\nPOLICY_LOSSES: ")
    registry.write_text(
        before + table + after.replace("    functions=_same(\n", f"    functions=_same(\n        {line}\n", 1)
    )
    debug = tmp_path / "configs" / "debug" / "ppo.yaml"
    (tmp_path / "mine.yaml").write_text(f"defaults: [{debug}]\n{settings}")
    command = [sys.executable, "-c", TRIAL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # r = e^0.5 = 1.6487212707: -2 r + 0.5 (r - 1)^2
    assert abs(float(done.stdout) + 3.0870229) < 1e-6
