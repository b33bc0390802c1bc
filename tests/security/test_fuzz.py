"""Hostile files end in one clear message, or are accepted; nothing hangs, fills the memory or writes.

``FUZZ_INPUTS=200`` takes as many of each kind. The number alone determines an input.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, load
from megarl.config.schema import RandomModel
from megarl.convert.stored import open_hf, read_spec
from megarl.errors import UsageError
from megarl.preflight.check import check
from megarl.preflight.device_memory import check_memory
from megarl.preflight.epochs import with_steps
from megarl.run.checkpoints import BrokenCheckpointError, Checkpoints
from megarl.run.directory import write_random_model
from megarl.run.sinks import as_json
from megarl.weights.hf_files import CheckpointError
from tests.config.debug import DEBUG
from tests.data.rows import chatml_tokenizer, jsonl
from tests.run.staging import write_roles
from tests.security.hostile import json_text, misplaced, read, safetensors

INPUTS = int(os.environ.get("FUZZ_INPUTS", "12"))
MISPLACED = 0.06
SURROUNDING = 8  # copies of a row, for steps of 16
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
OVERLONG = "{name: soft_overlong, args: {max_tokens: 32, buffer_tokens: 32}}"
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {"prompt": "1+1?", "response": "2"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "tools": None},
        {"prompt_ids": [3, 4, 5], "response_ids": [6, 7, 1]},
    ],
    "reward_model": [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "margin": 0.5},
        {"prompt_ids": [3, 4], "chosen_ids": [5, 1], "rejected_ids": [6, 1]},
    ],
    "dpo": [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}],
    "ppo": [{"prompt": "1+1?", "answer": "2"}, {"messages": [{"role": "user", "content": "hi"}]}],
}

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer."""
    directory = tmp_path_factory.mktemp("fuzz") / "model"
    random_model = load(DEBUG).model.random
    assert random_model is not None
    fields = {**random_model.config, **SIZES, "num_key_value_heads": 2, "vocab_size": 128}
    write_random_model(RandomModel(config=fields), directory)
    chatml_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return directory


Input = tuple[Callable[[], object], type[Exception]]
"""A call that reads it, and the error that the call may raise."""


def copied(model: Path, directory: Path, name: str, chance: random.Random, content: Callable[[], bytes]) -> Path:
    """The model with another file of this name: one with this content, or no regular file."""
    shutil.copytree(model, directory)
    (directory / name).unlink()
    if chance.random() < MISPLACED:
        misplaced(chance, directory / name)
    else:
        (directory / name).write_bytes(content())
    return directory


def planned(model: Path, *overrides: str, stage: str = "sft") -> None:
    """Does what ``megarl plan config`` does with a model."""
    given = [f"model={{path: {model}, random: null, vocab_size: null}}", *overrides]
    config = load(DEBUG.with_stem(stage), given)
    check_memory(with_steps(config, check(config)))


def counted(kind: str, good: Callable[[], object], inputs: Callable[[int, random.Random], Input]) -> None:
    """Reads so many inputs of a kind, after one that must be accepted; prints how many were accepted and refused."""
    assert read(good, AssertionError) is None
    outcomes: Counter[str] = Counter()
    for number in range(INPUTS):
        call, error = inputs(number, random.Random(f"{kind} {number}"))
        try:
            outcomes["accepted" if read(call, error) is None else "refused"] += 1
        except BaseException as raised:
            raised.add_note(f"{kind} {number}")
            raise
    print(f"{kind}: {INPUTS} inputs, {dict(outcomes)}")
    assert outcomes["refused"] > INPUTS // 4


def test_a_config(model: Path, tmp_path: Path) -> None:
    fields = json.loads((model / "config.json").read_text())

    def inputs(number: int, chance: random.Random) -> Input:
        directory = copied(model, tmp_path / f"{number}", "config.json", chance, lambda: json_text(chance, fields))
        return lambda: planned(directory), ConfigError

    counted("config.json", lambda: planned(model), inputs)


def test_a_tokenizer(model: Path, tmp_path: Path) -> None:
    rows = jsonl(tmp_path, [*ROWS["sft"][:2], {"prompt": "x", "response": "y"}] * 8)
    given = [f"data.train={rows.path}", "data.chat_template=true", "data.evaluation=null"]

    def inputs(number: int, chance: random.Random) -> Input:
        name = chance.choice(("tokenizer.json", "tokenizer_config.json"))
        fields = json.loads((model / name).read_text())
        directory = copied(model, tmp_path / f"{number}", name, chance, lambda: json_text(chance, fields))
        return lambda: planned(directory, *given), ConfigError

    counted("tokenizer", lambda: planned(model, *given), inputs)


def test_a_safetensors_header(model: Path, tmp_path: Path) -> None:
    data, spec = (model / "model.safetensors").read_bytes(), read_spec(model)

    def convert(directory: Path) -> None:
        try:
            open_hf(directory, spec.manifest(spec.head))
        except (CheckpointError, UsageError) as error:
            raise ConfigError([]) from error

    def inputs(number: int, chance: random.Random) -> Input:
        name = "model.safetensors"
        directory = copied(model, tmp_path / f"{number}", name, chance, lambda: safetensors(chance, data))
        if chance.random() < 0.2:
            weight_map = json.dumps({"weight_map": {"lm_head.weight": name}})
            index = json_text(chance, json.loads(weight_map)) if chance.random() < 0.5 else weight_map.encode()
            (directory / "model.safetensors.index.json").write_bytes(index)
        return lambda: (convert if number % 2 else planned)(directory), ConfigError

    counted("safetensors", lambda: (planned(model), convert(model)), inputs)


def test_rows(model: Path, tmp_path: Path) -> None:
    def write(path: Path, rows: list[dict[str, Any]], chance: random.Random) -> None:
        if chance.random() < MISPLACED:
            misplaced(chance, path)
            return
        hostile = chance.randrange(len(rows))
        lines = [json.dumps(row).encode() for row in rows * SURROUNDING]
        lines[hostile] = json_text(chance, rows[hostile])
        path.write_bytes(chance.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(lines))

    def inputs(number: int, chance: random.Random) -> Input:
        stage = chance.choice(list(ROWS))
        path = tmp_path / f"{number}.jsonl"
        write(path, ROWS[stage], chance)
        return lambda: load_rows(stage, path), ConfigError

    def load_rows(stage: str, path: Path) -> None:
        if stage == "ppo":
            rules = ["groups.train.roles.reward=null", f"reward.functions=[{OVERLONG}]", "data.random=null"]
            given = [*rules, f"data.prompts={path}", "data.prompts_per_step=2"]
            sets: Any = check(load(DEBUG, [f"model={{path: {model}, random: null, vocab_size: null}}", *given]))
            for prompt in sets.rows["data.prompts"]:
                json.dumps(as_json(prompt.fields), ensure_ascii=False).encode()
        else:
            planned(model, f"data.train={path}", "data.evaluation=null", stage=stage)

    good = {stage: jsonl(tmp_path, rows * SURROUNDING, f"{stage}.jsonl") for stage, rows in ROWS.items()}
    counted("JSONL", lambda: [load_rows(stage, Path(rows.path)) for stage, rows in good.items()], inputs)


def test_a_checkpoint_manifest(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "good").commit(3, write_roles(tmp_path / "good/.step-3.staged"), {"prompts": {}})
    good = tmp_path / "good/step-3"
    fields = json.loads((good / "manifest.json").read_text())
    (tmp_path / "outside").write_bytes(b"x")

    def inputs(number: int, chance: random.Random) -> Input:
        name = "state.json" if chance.random() < 0.1 else "manifest.json"
        copied(good, tmp_path / f"{number}/step-3", name, chance, lambda: json_text(chance, fields))
        if chance.random() < MISPLACED:
            (tmp_path / f"{number}/step-3/actor/0-0.bin").unlink()
            misplaced(chance, tmp_path / f"{number}/step-3/actor/0-0.bin")
        return Checkpoints(tmp_path / f"{number}").latest, BrokenCheckpointError

    counted("checkpoint manifest", Checkpoints(tmp_path / "good").latest, inputs)
