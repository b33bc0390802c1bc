"""The rows of a plan's data."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples.sort_letters.checkpoint import write_checkpoint
from megarl.cli import app
from megarl.config import ConfigError, load
from megarl.groups.trainers import check_gpus
from megarl.plan.run_plan import plan_lines
from megarl.preflight.check import check
from tests.data.rows import tools_tokenizer

DEBUG = Path(__file__).parents[2] / "configs" / "debug"


def said(stage: str, *overrides: str) -> dict[str, str]:
    config = load(DEBUG / f"{stage}.yaml", overrides)
    return dict(plan_lines(config, check(config)))


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_skipped_rows_are_counted_by_rule(tmp_path: Path) -> None:
    pair = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
    rows = [pair] * 5 + [{**pair, "rejected_ids": [2]}] * 2 + [{**pair, "prompt_ids": [1] * 99}]
    train, held_out = written(tmp_path / "train.jsonl", rows), written(tmp_path / "held_out.jsonl", [pair, rows[5]])
    sources = [f"data.train={train}", f"data.evaluation={held_out}", "data.too_long=drop"]
    lines = said("reward_model", *sources, "data.pairs_per_step=2", "run.steps=1")
    assert lines["data"] == (
        f"{train}: 8 rows, 5 used, 3 left out (1 too long, 2 with equal responses); 0.4 epochs in 1 step of 2"
    )
    assert lines["evaluation"].startswith(f"{held_out}: 2 rows, 1 used, 1 left out (1 with equal responses); ")


@pytest.mark.process
def test_a_prompt_of_megabytes_is_refused_at_once(tmp_path: Path) -> None:
    rows = [{"prompt": "hi"}] * 4 + [{"prompt": "abcdefgh" * 1_000_000}]
    prompts = written(tmp_path / "prompts.jsonl", rows)
    tokenizer = tools_tokenizer(tmp_path / "tokenizer")
    given = [
        f"data.prompts={prompts}",
        f"model.tokenizer={tokenizer}",
        "data.chat_template=true",
        "model.vocab_size=null",
        "evaluation=null",
    ]
    begun = time.process_time()
    with pytest.raises(ConfigError, match="line 5: 8000000 characters cannot fit into 32 tokens"):
        said("grpo", *given)
    assert said("grpo", *given, "data.too_long=drop")["prompts"].startswith(f"{prompts}: 5 rows, 4 used")
    assert time.process_time() - begun < 4, "encoding takes a second for a million characters"


def test_prompts_are_printed_with_their_epochs(tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt_ids": [1, 2]}] * 10)
    given = [f"data.prompts={prompts}", "run.steps=5"]  # of 4 prompts each
    assert said("grpo", *given)["prompts"] == f"{prompts}: 10 rows; 2 epochs in 5 steps of 4"
    filtered = said("grpo", *given, "algo.filter=nonzero_std", "run.steps=1", "actor.optimizer.warmup=0")
    assert filtered["prompts"].endswith("; at least 0.4 epochs in 1 step of 4")
    assert said("ppo")["prompts"] == "32 random ones; 0.75 epochs in 3 steps of 8"
    chosen = said("ppo", "data.curriculum=thompson")["prompts"]
    assert chosen == "32 random ones; in 3 steps of 8, chosen by thompson (target 0.5, half_life 50)"
    assert "1 epoch x 1 mini-batch of 16 samples = 1 optimizer step" in said("grpo", "algo.mini_batches=1")["update"]


def test_a_model_without_weights_is_planned_but_not_trained(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=0)
    given = [f"model.path={tmp_path}", "model.random=null", "model.vocab_size=null"]
    assert "not checked" not in said("grpo", *given)
    (tmp_path / "model.safetensors").unlink()
    config = load(DEBUG / "grpo.yaml", given)
    assert "weights of model.path" in dict(plan_lines(config, check(config, bare=True)))["not checked"]
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert [problem.field for problem in caught.value.problems] == ["model.path"]


def test_roles_without_weights_are_planned(tmp_path: Path) -> None:
    """Reference and reward models are frozen; a start digests their weights, for a resume."""
    for name in ("model", "reward"):
        write_checkpoint(tmp_path / name, seed=0)
        (tmp_path / name / "model.safetensors").unlink()
    fields = json.loads((tmp_path / "reward/config.json").read_text())
    kind = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1, "id2label": {"0": "score"}}
    (tmp_path / "reward/config.json").write_text(json.dumps({**fields, **kind}))
    paths = [f"{name}={tmp_path / where}" for name, where in (("model.path", "model"), ("reward.path", "reward"))]
    given = [*paths, "model.random=null", "model.vocab_size=null", f"run.dir={tmp_path / 'run'}"]
    planned = CliRunner().invoke(app, ["plan", str(DEBUG / "ppo.yaml"), *given], env={"COLUMNS": "200"})
    assert planned.exit_code == 0, planned.output
    assert planned.output.count("the weights of ") == 2


@pytest.mark.process
def test_the_first_prompt_is_shown_as_the_model_sees_it(tmp_path: Path) -> None:
    tokenizer = tools_tokenizer(tmp_path / "tokenizer")
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": "hi"}, *[{"prompt": "ho"}] * 3])
    given = [
        f"data.prompts={prompts}",
        f"model.tokenizer={tokenizer}",
        "data.chat_template=true",
        "model.vocab_size=null",
    ]
    lines = said(
        "grpo", *given, "data.chat_template_kwargs.enable_thinking=false", "evaluation=null", "rollout.max_model_len=80"
    )
    shown = "<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n<think></think>"
    assert lines["first prompt"] == f'36 tokens: "{shown}"'
    assert "first prompt" not in said("ppo")


def test_a_forward_pass_before_the_update_is_printed_with_its_reason() -> None:
    by_pass = "by a forward pass before the update, for "
    assert said("grpo")["old logprobs"] == f"{by_pass}algo.mini_batches"
    assert said("ppo")["old logprobs"].count("algo.") == 3
    one = ["algo.mini_batches=1", "algo.ppo_epochs=1"]
    penalty = ["algo.kl={in: loss, estimator: k3, cumulative: true}", "critic.warmup_steps=1"]
    assert said("ppo", *one)["old logprobs"] == f"{by_pass}algo.kl"
    assert said("grpo", *one)["old logprobs"].startswith("those of the update")
    assert said("ppo", *one, *penalty)["old logprobs"].endswith("; in the critic's 1 step alone by a pass")
    assert "old logprobs" not in said("grpo", "algo.correction.old_logprobs=rollout")
    assert said("grpo", *one, "algo.correction.m2po={}")["old logprobs"].endswith("algo.correction.m2po")


def test_the_layers_of_a_run_on_gpus_are_named() -> None:
    half = "model.random.config.dtype=bfloat16"
    assert "layers" not in said("sft")
    assert "products of float32" in said("sft", "cluster.device=cuda")["layers"]
    assert said("sft", "cluster.device=cuda", half)["layers"] == "Transformer Engine's, where it is installed"
    assert said("sft", "cluster.device=cuda", half, "model.layers=local")["layers"] == "Megatron's own"


def test_a_run_on_several_nodes_is_planned_without_the_address_of_their_cluster() -> None:
    given = ["cluster.device=cuda", "cluster.nodes=2", "cluster.devices_per_node=2"]
    assert "on each of 2 nodes, as configured: the cluster was not looked at" in said("grpo", *given)["devices"]
    with pytest.raises(ConfigError, match="several nodes of GPUs"):
        check_gpus(load(DEBUG / "grpo.yaml", given))


def test_gpus_are_looked_for_where_a_run_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: pytest.fail("a run on CPUs has none"))
    check_gpus(load(DEBUG / "sft.yaml"))
    monkeypatch.setattr("megarl.groups.trainers.vllm_device", lambda: pytest.fail("the nodes come first"))
    given = ["cluster.device=cuda", "cluster.nodes=2", "cluster.devices_per_node=2"]
    with pytest.raises(ConfigError, match="several nodes of GPUs"):
        check_gpus(load(DEBUG / "grpo.yaml", given))
