"""The harness of `verifiers` against a gateway: the package's own client and programs, and tasksets of its classes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.environments.environment import FailedEnvironmentError
from tests.conversations.gateways import GatewayTest, call_text, gateway_tokenizer, gateway_world
from tests.needs import lacking

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verifiers/bin/python"
HARNESS = ROOT / "examples/gateway/verifiers_harness.py"
CONFIG = """
[env.taskset]
id = "{taskset}"
[env.agent.harness]
id = "null"
[env.agent.runtime]
type = "subprocess"
"""
UV = f"""#!/bin/sh
case "$*" in
  *--help*) echo "--script" ;;
  "python find"*) echo "{PYTHON}" ;;
esac
"""
"""In place of uv, which would install the packages of verifiers' program: they are there."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the command of a taskset's harness."""
    if not PYTHON.exists():
        lacking("make verifiers installs verifiers")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV)
    (tmp_path / "bin/uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "verifiers_tasksets"))

    def make(taskset: str, text: str = CONFIG) -> list[str]:
        config = tmp_path / f"{taskset}.toml"
        config.write_text(text.format(taskset=taskset))
        return [str(PYTHON), str(HARNESS), str(config)]

    return make


async def played(answers: Iterator[str], args: dict[str, Any], directory: Path) -> tuple[str, int]:
    """Plays an environment with these turns of the model, to the reward 1; its text, and the number of turns."""
    tokenizer = gateway_tokenizer(directory / "tokenizer")
    async with gateway_world(tokenizer, lambda _: next(answers), directory, **args) as world:
        conversation, running = world.converse(index=0)
        await running
        assert conversation.reward == 1.0
        GatewayTest(world, conversation, running, "", "", {}).check_exact()
        (branch,) = conversation.branches
        return world.tokenizer.decode(branch.ids, special=True), len(branch.turns)


async def test_a_run_of_the_command_is_a_rollout(command: Any, tmp_path: Path) -> None:
    """Of an environment with a tool, which the model asks."""
    answers = iter([call_text("prices_price", item="apple"), "50"])
    args = {"command": command("shop-v1"), "time_limit": 200.0, "rewarded": False}
    text, _ = await played(answers, args, tmp_path)
    assert "Tells the price of an item." in text.partition("<s>user")[0]
    assert "<s>system\nBe brief.</s>\n<s>user\nWhat is an apple?</s>" in text
    assert text.endswith("<s>tool\n50</s>\n<s>assistant\n50</s>")


HANGMAN = """
[env.taskset]
id = "{taskset}"
game = "Hangman-v0"
[env.player.harness]
id = "null"
[env.player.runtime]
type = "subprocess"
"""


async def test_a_game_of_textarena_is_played(command: Any, tmp_path: Path) -> None:
    """With a list of one word, in place of that which nltk would download."""
    words = tmp_path / "nltk/corpora/words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("moon\n")
    variables = ["/usr/bin/env", f"NLTK_DATA={tmp_path / 'nltk'}", "https_proxy=http://127.0.0.1:9"]
    answers = iter(["I guess [o].", "[x]", "[moon]"])
    args = {"command": [*variables, *command("textarena", HANGMAN)], "time_limit": 200.0, "rewarded": False}
    text, turns = await played(answers, args, tmp_path)
    assert turns == 3
    assert "You are playing Hangman." in text.partition("I guess")[0]
    assert "_   O   O   _" in text.partition("I guess")[2].partition("[x]")[0]
    assert "_   O   O   _" in text.partition("[x]")[2]


async def test_a_program_plays_the_tasks_of_a_run(command: Any, tmp_path: Path) -> None:
    """Several at once, whose rewards are those of the environment; one that fails says why; it ends with the run."""
    args = {"time_limit": 200.0, "rewarded": False}
    tokenizer = gateway_tokenizer(tmp_path / "tokenizer")
    async with gateway_world(tokenizer, lambda text: "6" if "3 + 3" in text else "many", tmp_path, **args) as world:
        right, wrong, none = (world.converse(f"task-{index}", index=index) for index in (3, 5, 99))
        player = await asyncio.create_subprocess_exec(*command("sums-v1"), str(world.file))
        try:
            await asyncio.gather(right[1], wrong[1])
            assert [conversation.reward for conversation, _ in (right, wrong)] == [0.75, 0.0]
            for conversation, running in (right, wrong):
                GatewayTest(world, conversation, running, "", "", {}).check_exact()
            with pytest.raises(FailedEnvironmentError, match="the taskset has 10 tasks, and none of the index 99"):
                await none[1]
            await world.gateway.close()
            assert await asyncio.wait_for(player.wait(), 30) == 0
        finally:
            if player.returncode is None:
                player.send_signal(signal.SIGTERM)
                await player.wait()
