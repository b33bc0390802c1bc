"""`megarl plan weights`: its numbers against hand counts, and errors for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from megarl.cli import app
from tests.weights.models import glm4_moe_config, qwen2_config

HIDDEN, FFN, LAYERS, VOCAB, HEAD = 24, 40, 4, 128, 6
ATTENTION = (HIDDEN + 1) * (4 + 2 * 2) * HEAD + HIDDEN * HIDDEN
LAYER = ATTENTION + 3 * HIDDEN * FFN + 2 * HIDDEN
MATRICES = LAYERS * (ATTENTION + 3 * HIDDEN * FFN) + 2 * VOCAB * HIDDEN
NORMS = (2 * LAYERS + 1) * HIDDEN
ITEM = 4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with nothing but the config of a small Qwen2."""
    (tmp_path / "config.json").write_text(json.dumps(qwen2_config(vocab_size=VOCAB)))
    return tmp_path


def invoke(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "weights", "--hf", str(model), *arguments], env={"COLUMNS": "120"})


def report(model: Path, *arguments: str) -> dict[str, Any]:
    result = invoke(model, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_planned_bytes_equal_shard_sizes(model: Path) -> None:
    found = report(model, "--train", "tp=2,pp=2,dp=2", "--rollout", "tp=2,replicas=3", "--devices-per-node", "4")
    shard = (MATRICES // 2 + NORMS) * ITEM
    assert found["parameters"] == MATRICES + NORMS
    shown = invoke(model, "--train", "tp=2", "--rollout", "tp=2").stdout
    assert f"qwen2, {MATRICES + NORMS:,} parameters, " in shown
    assert found["needed_bytes"] == found["nbytes"] == 6 * shard
    assert found["redundancy"] == 1.0
    assert found["received"] == {"median": shard, "maximum": shard}
    assert found["links"]["network"]["nbytes"] == 6 * shard, "the trainer fills two nodes"
    assert found["links"]["network"]["messages"] == found["messages"]
    assert 8 * found["sent"]["median"] < 1.5 * 6 * shard
    assert found["staging_bytes"] == 2 * found["bucket_bytes"]


def test_planned_bytes_of_a_mixture_equal_shard_sizes(tmp_path: Path) -> None:
    """The first of four layers is dense; engines have routers in float32, and all ranks the biases of these."""
    (tmp_path / "config.json").write_text(json.dumps(glm4_moe_config(vocab_size=VOCAB, dtype="bfloat16")))
    found = report(tmp_path, "--train", "tp=2,dp=2,ep=2", "--rollout", "tp=2,replicas=2")
    attention = (HIDDEN + 1) * (4 + 2 * 2) * 8 + 4 * 8 * HIDDEN
    experts = 3 * HIDDEN * 12 * (4 + 2)  # routed and shared ones
    matrices = 4 * attention + 3 * HIDDEN * FFN + 3 * experts + 2 * VOCAB * HIDDEN
    routers = 3 * 4 * HIDDEN
    biases = 3 * 4
    shard = 2 * (matrices // 2 + NORMS) + 4 * (routers + biases)
    assert found["parameters"] == matrices + NORMS + routers + biases
    assert found["model_bytes"] == 2 * (matrices + NORMS + routers) + 4 * biases
    assert found["needed_bytes"] == found["nbytes"] == 4 * shard
    assert found["received"] == found["sent"] == {"median": shard, "maximum": shard}
    assert found["messages"] == 4 * 2, "each engine rank has experts of both EP ranks"


def test_colocated_engines_receive_from_nearby_trainers(model: Path) -> None:
    arguments = ("--train", "tp=2,pp=2", "--rollout", "tp=2,replicas=2", "--devices-per-node", "2", "--colocated")
    links = report(model, *arguments)["links"]
    # Each stage is on a node, as is each engine; TP shards lie alike but for the norms, which either rank has.
    stage = [(2 * (LAYER - 2 * HIDDEN) + VOCAB * HIDDEN) // 2 + norms * HIDDEN for norms in (4, 5)]
    assert links["device"]["nbytes"] == 2 * sum(stage) * ITEM
    assert links["node"]["nbytes"] == 0
    assert links["network"]["nbytes"] == 2 * sum(stage) * ITEM
    assert links["network"]["received"] == max(stage) * ITEM


def test_the_time_estimate_is_the_slowest_ranks_bytes_over_link_speed(model: Path) -> None:
    arguments = ("--train", "dp=2", "--rollout", "replicas=2", "--devices-per-node", "2", "--link", "network=0.001")
    found = report(model, *arguments)
    whole = (MATRICES + NORMS) * ITEM
    assert found["links"]["network"]["bytes_per_second"] == 1e6
    assert found["links"]["node"]["bytes_per_second"] == 4e11
    assert found["slowest_rank_seconds"] == pytest.approx(whole / 1e6)
    assert found["links"]["network"]["seconds"] == pytest.approx(whole / 1e6)


def test_in_lockstep_each_bucket_waits_for_its_slowest_rank(model: Path) -> None:
    arguments = ("--train", "pp=2", "--rollout", "replicas=1", "--devices-per-node", "1", "--link", "network=0.001")
    found = report(model, *arguments, "--bucket-mib", "0.01")
    whole = (MATRICES + NORMS) * ITEM
    assert found["slowest_rank_seconds"] == pytest.approx(whole / 1e6), "the engine receives everything"
    assert found["in_step_seconds"] == pytest.approx(whole / 1e6), "in every bucket"
    assert found["bucket_bytes"] <= 0.01 * 2**20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--train tp=2,pq=2 --rollout tp=2", "--train: 'pq=2' must be KEY=NUMBER, with KEY of tp, pp, dp, vpp, ep"),
        (
            "--train tp=2,tp=1 --rollout tp=2",
            "--train: 'tp=1' must be KEY=NUMBER, with KEY of tp, pp, dp, vpp, ep, each once",
        ),
        ("--train tp=2 --rollout replicas=0", "--rollout: replicas must be a number above 0, not '0'"),
        ("--train tp=2 --rollout tp=2 --link node=fast", "--link: node must be a number above 0, not 'fast'"),
        ("--train tp=5 --rollout tp=1", "tp 5 does not divide the 4 attention heads"),
        ("--train tp=1 --rollout tp=3", "tp 3 does not divide the 4 attention heads"),
        ("--train dp=3,ep=2 --rollout tp=1", "ep 2 does not divide dp 3"),
        ("--train pp=2,vpp=4 --rollout tp=1", "2 stages x 4 chunks are more than the 4 layers"),
        ("--train tp=2 --rollout tp=2 --bucket-mib 1e-6", "--bucket-mib"),
        ("--train tp=2 --rollout tp=2 --devices-per-node 0", "--devices-per-node"),
        ("--train tp=2 --rollout tp=2,replicas=2 --colocated", "4 ranks exceed the trainer's 2 devices"),
    ],
)
def test_wrong_arguments_are_refused(model: Path, arguments: str, said: str) -> None:
    result = invoke(model, *arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize(
    ("content", "said"), [(None, "does not exist"), ('{"architectures": ["BertModel"]}', "BertModel is not supported")]
)
def test_a_model_that_cannot_be_planned_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    result = invoke(tmp_path, "--train", "tp=2", "--rollout", "tp=2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
