"""Runs whose environments and harnesses send what cannot be encoded: it fails conversations, and ends no run."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from examples.sort_letters.checkpoint import write_checkpoint
from tests.e2e.runs import finish, lines, run_to_end, started

pytestmark = [pytest.mark.e2e]

CONFIG = """
stage: grpo
run: {{dir: {directory}/run, steps: 2}}
model: {{path: {directory}/model}}
data: {{prompts: {directory}/prompts.jsonl, prompts_per_step: 3, samples_per_prompt: 2}}
environment: {environment}
cluster: {{device: cpu, devices_per_node: 1}}
groups: {{train: {{devices: "0", roles: {{actor: {{tokens_per_micro_batch: 128}}}}}}}}
rollout: {{devices: "0", max_new_tokens: 8, max_model_len: 64, kv_cache_mib: 64, sleep: true}}
actor: {{optimizer: {{lr: 1.0e-3}}}}
"""
WAYS = ("well", "half a character", "metric of half a character")


def write_run(directory: Path, environment: dict[str, Any]) -> Path:
    write_checkpoint(directory / "model", 0)
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "a", "way": way}) + "\n" for way in WAYS))
    config = directory / "run.yaml"
    config.write_text(CONFIG.format(directory=directory, environment=json.dumps(environment)))
    return config


def test_an_environment_fails_and_measures_in_halves_of_characters(tmp_path: Path) -> None:
    config = write_run(tmp_path, {"name": "tests.conversations.worlds:Faulty"})
    finished = run_to_end(["train", str(config)], writes_model=True)
    finished.assert_succeeded()
    for step in lines(tmp_path / "run" / "metrics.jsonl"):
        assert (step["environment/failed"], step[r"environment/m\ud800"]) == (2, 1.0)
    assert finished.errors.count(r"bad \ud800") <= 2, "the exception, and its line of code"
    assert (tmp_path / "run" / "logs" / "environments-0.log").stat().st_size < 50_000, "reasons are short"


def post(url: str, key: str, body: object = None) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def harness(file: Path, tasks: int) -> None:
    """Takes tasks as they come; says of one of three that it failed, and scores the others."""
    deadline = time.monotonic() + 200
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    access = json.loads(file.read_text())
    while tasks and time.monotonic() < deadline:
        if (taken := post(f"{access['url']}/tasks/next", access["key"])) is None:
            time.sleep(0.05)
            continue
        tasks -= 1
        with suppress(urllib.error.HTTPError):  # no room is left for a turn
            post(f"{taken['session_url']}/v1/completions", taken["key"], {"prompt": "a"})
        failed = taken["task"]["fields"]["way"] == "half a character"
        end = {"failed": "\ud800" + "x" * 1_000_000} if failed else {"reward": 1.0, "done": True}
        post(f"{taken['session_url']}/reward", taken["key"], end)


def test_a_key_file_goes_with_a_run_that_fails(tmp_path: Path) -> None:
    """In the second step, for which no harness comes."""
    args = {"command": None, "wait_limit": 5}
    config = write_run(tmp_path, {"name": "gateway", "args": args, "retries": 0})
    file = tmp_path / "run" / "gateway-0.json"
    talking = threading.Thread(target=harness, args=(file, 2 * len(WAYS)))
    with started(["train", str(config)], writes_model=True) as run:
        talking.start()
        finished = finish(*run)
    talking.join()
    assert finished.status == 1
    assert "has asked" in finished.errors, finished.errors
    assert "for a task in 5 s" in finished.errors
    (step,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert step["environment/failed"] == 2
    assert not file.exists()
    finished.assert_clean()
    assert len(finished.errors) < 20_000
