"""Lets the model play environments of `verifiers` 0.4: `python verifiers_harness.py CONFIG [GATEWAY [ROLLOUTS]]`.

It runs with a Python that has verifiers and the environment's package, and needs nothing of MegaRL's. CONFIG is a TOML
file of verifiers' own, of which the table `[env]` counts. The row's `index` is the number of the task.

Started by a gateway's `command`, it plays one rollout. With GATEWAY, the file `gateway-0.json` of a run, it takes one
task after another until the run ends, up to ROLLOUTS (32) of them at a time.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

POLL_S, TIMEOUT_S = 0.5, 60.0


class Player:
    """Plays the tasks of an environment whose servers are up."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._left, self._tasks = iter(environment.taskset), []

    async def play(self, task: dict[str, Any], url: str, key: str, model: str) -> None:
        """Plays a rollout, and posts its reward, or what went wrong."""
        try:
            result = {"reward": await self._reward(task["fields"]["index"], url, key, model)}
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}"}
        with suppress(httpx.TransportError):  # the run has ended
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S) as client:
                posted = await client.post(f"{url}/reward", json={**result, "done": True})
            if posted.is_error:
                print(f"the session {url} refused {result}: {posted.text}", flush=True)

    async def _reward(self, index: int, url: str, key: str, model: str) -> float:
        variable = f"MEGARL_API_KEY_{url.rpartition('/')[2]}"
        os.environ[variable] = key  # verifiers reads keys from there, and gives programs none with this name
        try:
            endpoint = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var=variable)
            context = vf.ModelContext(model=model, client=endpoint)
            episode = await self._environment.run_episode(self._task(index), context)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
        if len(rewards) != 1:
            raise RuntimeError(f"{len(rewards)} agents of the environment are trained, and a session has one reward")
        if not math.isfinite(rewards[0]):
            raise RuntimeError(f"the reward is {rewards[0]}")
        return float(rewards[0])

    def _task(self, index: int) -> Any:
        self._tasks += islice(self._left, max(0, index + 1 - len(self._tasks)))
        if index >= len(self._tasks):
            raise ValueError(f"the taskset has {len(self._tasks)} tasks, and none of the index {index}")
        return self._tasks[index]


async def serve(player: Player, file: Path, rollouts: int) -> None:
    """Plays the tasks of a run until its gateway is gone."""
    access = json.loads(file.read_text())
    playing: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {access['key']}"}, timeout=TIMEOUT_S) as client:
        while file.exists():
            taken = None
            if len(playing) < rollouts:
                try:
                    taken = await client.post(f"{access['url']}/tasks/next")
                except httpx.TimeoutException:
                    continue
                except httpx.TransportError:
                    return
            if taken is None or taken.status_code == 204:
                await asyncio.sleep(POLL_S)
            else:
                got = taken.raise_for_status().json()
                playing.add(asyncio.create_task(player.play(got["task"], got["session_url"], got["key"], got["model"])))
            playing = {task for task in playing if not task.done()}


async def main(arguments: Sequence[str]) -> None:
    config = tomllib.loads(Path(arguments[0]).read_text())
    environment = vf.load_environment(vf.resolve_env_config(config["env"]))
    async with environment.serving():
        player = Player(environment)
        if len(arguments) > 1:
            await serve(player, Path(arguments[1]), int(arguments[2]) if len(arguments) > 2 else 32)
        else:
            own = (os.environ[name] for name in ("MEGARL_SESSION_URL", "OPENAI_API_KEY", "MEGARL_MODEL"))
            await player.play(json.loads(os.environ["MEGARL_TASK"]), *own)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
