"""Other layouts and placements: the first update on one recorded batch is the same, and the run continues.

tests/megatron/test_oracle.py has the layouts of trainers, and test_asynchronous.py every role in a group of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import DebugRun
from tests.e2e.runs import PARTS, lines, train

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

ROLES = "groups.train.roles"
LAYOUTS = {
    "rollout TP2": ["rollout.devices=0-1", "rollout.tp=2"],
    "critic in its own group": [
        f"{ROLES}.critic=null",
        "groups.critic={devices: 4-5, roles: {critic: {pp: 2, tokens_per_micro_batch: 128}}}",
        "cluster.devices_per_node=6",
    ],
}
MIXTURE = (
    "model.random.config={architectures: [MixtralForCausalLM], model_type: mixtral, num_local_experts: 4, "
    "num_experts_per_tok: 2, intermediate_size: 64, num_hidden_layers: 2, sliding_window: null}",
    f"{ROLES}.actor={{tp: 1, pp: 2, ep: 2}}",
    f"{ROLES}.reference={{tp: 2, ep: 2, sequence_parallel: true}}",
    f"{ROLES}.reward={{tp: 1, ep: 4}}",
)
"""An MoE model, whose experts the actor's replicas divide; the engine holds all of them."""
COMPARED = ("policy/loss", "policy/grad_norm", "value/loss", "value/grad_norm")
TOLERANCE = 1e-5  # the project's bar for one batch under any split, in float32


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_update_does_not_depend_on_the_layout(debug_run: DebugRun, tmp_path: Path, name: str) -> None:
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    for sample in debug_run.recorded.glob("1%2F*"):  # of step 1; the others are generated
        shutil.copy(sample, recorded)
    finished = train(tmp_path / "run", f"rollout.replay={recorded}", *PARTS, *LAYOUTS[name])
    finished.assert_succeeded()
    expected, found = (lines(run / "updates.jsonl")[0] for run in (debug_run.directory, tmp_path / "run"))
    for metric in COMPARED:
        assert found[metric] == pytest.approx(expected[metric], rel=TOLERANCE), metric
    assert_trained(tmp_path / "run", steps=3)


def test_an_moe_model_trains_and_its_engine_gets_the_weights(tmp_path: Path) -> None:
    train(tmp_path / "run", *MIXTURE, "run.steps=2").assert_succeeded()
    assert_trained(tmp_path / "run", steps=2)
    for line in lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["policy/rerouted"] < 0.05, "trainer and engine choose other experts in float32"


def assert_trained(directory: Path, steps: int) -> None:
    metrics = lines(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    for line in metrics:
        assert line["rollout/logprob_gap"] < 1e-4, "trainer and engine disagree about the tokens that it sampled"
        assert line["policy/grad_norm"] > 0
        assert line["policy/skipped"] == 0
