"""A server of the real package OpenEnv: a game at /game, tools at /tools. Prints its port when it listens.

It runs in the environment of `make openenv`, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Move(Action):
    move: str


class Board(Observation):
    text: str
    seed: int | None = None


class Game(Environment):
    """A game that is over with the move `win`."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed: int | None = None, level: int | None = None, **_: Any) -> Board:
        return Board(text=f"level {level}", seed=seed)

    def step(self, action: Move, **_: Any) -> Board:
        won = action.move == "win"
        return Board(text=f"{action.move}!", reward=1.0 if won else None, done=won)


class Sums(MCPEnvironment):
    """A tool that adds; each sum is worth 0.25, and 9 ends the conversation."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self) -> None:
        server = FastMCP("sums")
        server.tool(add)
        super().__init__(server)

    def reset(self, **_: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise ValueError(f"no tool is called: {action}")

    async def step_async(self, action: Action, **options: Any) -> Observation:
        seen = await super().step_async(action, **options)
        if isinstance(action, CallToolAction) and isinstance(seen, CallToolObservation) and seen.error is None:
            seen.reward, seen.done = 0.25, sum(action.arguments.values()) == 9
        return seen


def add(a: int, b: int = 0) -> int:
    """Adds."""
    return a + b


async def serve() -> None:
    app = FastAPI()
    app.mount("/game", create_fastapi_app(Game, Move, Board, max_concurrent_envs=4))
    app.mount("/tools", create_fastapi_app(Sums, Action, Observation, max_concurrent_envs=4))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.02)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


asyncio.run(serve())
