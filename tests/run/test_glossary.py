"""docs/metrics.md describes every metric that the code can write."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.algos.preference_loss import pairwise
from megarl.algos.registry import DIRECT_LOSSES, POLICY_LOSSES, VALUE_LOSSES

_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_PLACEHOLDER = re.compile(r"[A-Z]+")
PACKAGE = Path(__file__).parents[2] / "megarl"
FAMILIES = (
    "objective|rewards|scores|advantages|group|filter|policy|loss|update|value|returns|sft|dpo|reward_model|select|data|"
    "normalisation|held_out|rollout|response_length|prompt_length|staleness|rollout_corr|sync|eval|time|perf|memory"
)
METRIC = re.compile(rf"({FAMILIES})/[a-z0-9_]*[a-z0-9]")
PARTS = ("algos", "cluster", "experience", "loop", "megatron", "rollout", "run")
SOURCES = [file for part in PARTS for file in PACKAGE.glob(f"{part}/*.py")]


def undescribed(names: set[str]) -> set[str]:
    """Those of these metrics that are in no first column of the page's tables; ``FUNCTION`` there is any name."""
    rows = re.findall(r"^\| (`.*?`) \|", _PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    described = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    patterns = [re.compile(_PLACEHOLDER.sub(r"\\w+", name)) for name in described]
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)}


def literals(source: str) -> Iterator[str]:
    """The metrics that a source names, and the stages that it times."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.fullmatch(node.value):
            yield node.value
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("timers"):
            yield from (f"time/{stage.value}" for stage in node.args if isinstance(stage, ast.Constant))


def test_every_metric_named_in_the_code_is_documented() -> None:
    named = {name for file in SOURCES for name in literals(file.read_text(encoding="utf-8"))}
    assert {"objective/kl", "rollout/samples", "time/step"} <= named, "the search finds nothing"
    assert not undescribed(named)


def test_every_metric_of_a_loss_is_documented() -> None:
    x = torch.zeros(1, 1)
    inputs = {**dict.fromkeys(POLICY_LOSSES.arguments, x), "response_mask": x.bool()}
    policy = {"kl", "entropy"}  # of the terms that a run adds
    for name in POLICY_LOSSES.functions:
        loss = POLICY_LOSSES.function(name)(**{key: inputs[key] for key in POLICY_LOSSES.reads(name)})
        policy |= {*loss.metrics}
        policy |= {f"{spread}_{kind}" for spread in loss.spreads for kind in ("mean", "var", "min", "max")}
    assert "sequence_ratio" in policy
    value: set[str] = set()
    for name in VALUE_LOSSES.functions:
        value |= {*VALUE_LOSSES.function(name)(x, x, x).metrics}
    reward_model = pairwise(x[0], x[0]).metrics
    losses = {"policy": policy, "value": value, "reward_model": reward_model, "sft": {"entropy"}}
    losses["dpo"] = {"logprob", "logprob_chosen", "logprob_rejected"}  # which a run adds
    for name in DIRECT_LOSSES.functions:
        losses["dpo"] |= {*DIRECT_LOSSES.function(name)(**dict.fromkeys(DIRECT_LOSSES.reads(name), x[0])).metrics}
    update_metrics = ("loss", "grad_norm", "lr", "skipped")
    names = {f"{prefix}/{name}" for prefix, metrics in losses.items() for name in (*metrics, *update_metrics)}
    assert not undescribed(names)
    assert undescribed({"policy/nonsense", "objective/kl/x"}) == {"policy/nonsense", "objective/kl/x"}
