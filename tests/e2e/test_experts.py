"""PPO on an MoE model: the actor's replicas divide the experts, and the engine holds all of them.

In `make test`, tests/megatron/test_experts.py has the training, and test_sync.py the transfer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import lines, train

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

ROLES = "groups.train.roles"
MIXTURE = (
    "model.random.config={architectures: [MixtralForCausalLM], model_type: mixtral, num_local_experts: 4, "
    "num_experts_per_tok: 2, intermediate_size: 64, num_hidden_layers: 2, sliding_window: null}",
    f"{ROLES}.actor={{tp: 1, pp: 2, ep: 2}}",
    f"{ROLES}.reference={{tp: 2, ep: 2, sequence_parallel: true}}",
    f"{ROLES}.reward={{tp: 1, ep: 4}}",
)


def test_an_moe_model_trains_and_its_engine_gets_the_weights(tmp_path: Path) -> None:
    finished = train(tmp_path / "run", *MIXTURE, "run.steps=2")
    assert finished.status == 0, finished.errors
    finished.assert_clean()
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["rollout/logprob_gap"] < 1e-4, "trainer and engine disagree about the tokens that it sampled"
    assert all(line["policy/grad_norm"] > 0 and line["policy/skipped"] == 0 for line in metrics)
