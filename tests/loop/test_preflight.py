"""What is refused before anything starts, beyond the rules of the configuration itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, load
from megarl.loop.preflight import check

DEBUG = Path(__file__).parents[2] / "configs" / "debug" / "ppo.yaml"
MODEL = "model.random.config"
LLAMA = [f"{MODEL}.model_type=llama", f"{MODEL}.architectures=[LlamaForCausalLM]"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(load(DEBUG, list(overrides)))
    return str(error.value)


def prompts(tmp_path: Path, *lengths: int) -> list[str]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"token_ids": [3] * length}) + "\n" for length in lengths))
    return ["data.random=null", f"data.prompts={file}"]


def checkpoint(directory: Path, **fields: Any) -> Path:
    directory.mkdir()
    config = {**load(DEBUG).model.hf_config(), **fields}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_debug_run_can_start() -> None:
    assert len(check(load(DEBUG))) == 32
    assert len(check(load(DEBUG, [*LLAMA, f"{MODEL}.num_key_value_heads=null"]))) == 32


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{MODEL}.vocab_size=abc"], "vocab_size: 'abc' is not a positive integer"),
        ([f"{MODEL}.num_attention_heads=0"], "num_attention_heads: 0 is not a positive integer"),
        ([f"{MODEL}.max_position_embeddings=null"], "max_position_embeddings: None is not a positive integer"),
        ([f"{MODEL}.rope_theta=null"], "rope_theta: missing"),
        ([f"{MODEL}.hidden_act=gelu"], "hidden_act"),
        ([*LLAMA, f"{MODEL}.rope_parameters={{rope_type: yarn, rope_theta: 10000.0}}"], "yarn"),
        ([f"{MODEL}.dtype=float16"], "float16"),
        (["model.vocab_size=101"], "at most the 100 ids"),
    ],
)
def test_a_model_that_cannot_run_is_refused(overrides: list[str], said: str) -> None:
    assert said in refusal(*overrides)


def test_a_reward_model_needs_a_score_head(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "reward")
    text = refusal(f"reward.path={path}")
    assert f"reward.path = {path}" in text
    assert "score head" in text


def test_a_broken_file_of_prompts_is_refused_with_its_line(tmp_path: Path) -> None:
    arguments = prompts(tmp_path, *[2] * 8)
    (tmp_path / "prompts.jsonl").write_text('{"token_ids": [3, 4]}\n{"token_ids": [3, 100]}\n')
    assert "line 2: token_ids holds 100" in refusal(*arguments)


def test_prompts_that_leave_no_room_are_refused(tmp_path: Path) -> None:
    text = refusal(*prompts(tmp_path, *[2] * 8, 33))
    assert "line 9: 33 tokens are too many: at most 32 fit" in text
    assert "rollout.max_model_len" in text


def test_there_is_something_to_replay(tmp_path: Path) -> None:
    assert "holds recorded rollouts" in refusal(f"rollout.replay={tmp_path}")


def test_a_step_needs_its_prompts(tmp_path: Path) -> None:
    assert "at most the 3 prompts" in refusal(*prompts(tmp_path, 2, 2, 2))


def test_prompts_have_ids_in_use_only(tmp_path: Path) -> None:
    assert "token_ids holds 3" in refusal("model.vocab_size=3", *prompts(tmp_path, *[2] * 8))
    assert all(max(prompt.token_ids) < 50 for prompt in check(load(DEBUG, ["model.vocab_size=50"])))


def test_plan_refuses_what_train_would(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl", "plan", str(DEBUG), f"{MODEL}.hidden_act=gelu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "hidden_act" in done.stderr
    assert "Traceback" not in done.stderr
