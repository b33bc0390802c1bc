"""Environments of OpenEnv: sessions with a server that runs elsewhere, by its protocol of JSON over a WebSocket.

The protocol is that of OpenEnv 0.10. Its package is not needed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.environments.environment import Action, Environment, EnvironmentTask, Observation

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_LARGEST_MESSAGE = 1 << 27
_SEEDS = 1 << 32
"""NumPy's generators, which many environments seed, take no larger seeds."""


class OpenEnv(Environment):
    """A session of an OpenEnv server.

    Args:
        url: address of the server, http or https.
        action: field of the environment's action that gets the model's text; None: the model calls
            its tools.
        observation: field of its observations that the model sees; None: all, as JSON.
        columns: columns of the row for its reset.
    """

    def __init__(
        self,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        self._url = url
        self._action = action
        self._observation = observation
        self._columns = columns
        self._socket: ClientConnection | None = None

    async def reset(self, task: EnvironmentTask, seed: int) -> Observation:
        from websockets.asyncio.client import connect

        for name in self._columns:
            if name not in task.fields:
                raise ValueError(f"the row {task.prompt_id!r} has no column {name!r}: see columns")
        scheme, separator, rest = self._url.rstrip("/").partition("://")
        if scheme not in ("http", "https") or not separator:
            raise ValueError(f"url = {self._url!r} must begin with http:// or https://")
        address = f"{scheme.replace('http', 'ws')}://{rest}/ws"
        # A server may answer no ping while it computes a step: environment.time_limit is the limit.
        self._socket = await connect(address, max_size=_LARGEST_MESSAGE, open_timeout=None, ping_interval=None)
        given = {name: task.fields[name] for name in self._columns}
        reply = await self._request("reset", {"seed": seed % _SEEDS, **given})
        if self._action is None:
            listed = await self._request("step", {"type": "list_tools"})
            self.tools = [_tool(tool) for tool in listed["observation"]["tools"]]
        shown = self._shown(reply["observation"])
        messages = list(task.messages)
        if shown:
            messages.append({"role": "user", "content": shown})
        return Observation(messages=messages, done=bool(reply["done"]))

    async def step(self, action: Action) -> Observation:
        if self._action is not None:
            reply = await self._request("step", {self._action: action.content})
            messages = [{"role": "user", "content": self._shown(reply["observation"])}]
            reward = float(reply["reward"] or 0)
            return Observation(messages=messages, reward=reward, done=bool(reply["done"]))
        messages = []
        reward = 0.0
        done = not action.tool_calls
        for call in action.tool_calls:
            content = call.problem
            if content is None:
                fields = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
                reply = await self._request("step", fields)
                content = _result(reply["observation"])
                done = bool(reply["done"])
                reward += float(reply["reward"] or 0)
            messages.append(call.answer(content))
            if done:
                break
        return Observation(messages=messages, reward=reward, done=done)

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the server's answer to a message; a RuntimeError if that is an error."""
        assert self._socket is not None, "reset comes first"
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await self._socket.recv())
        if reply["type"] == "error":
            problem = f"{reply['data'].get('code')}: {reply['data']['message']}"
            raise RuntimeError(f"the server at {self._url} answered {kind} with {problem}")
        return reply["data"]

    def _shown(self, observation: Mapping[str, Any]) -> str:
        """Returns what the model sees of an observation."""
        if self._observation is None:
            seen = {name: value for name, value in observation.items() if name != "metadata"}
            return _text(seen) if seen else ""
        if self._observation not in observation:
            problem = f"has no {self._observation!r}; it has: {', '.join(observation)}"
            raise ValueError(f"an observation of {self._url} {problem}")
        return _text(observation[self._observation])


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _result(observation: Mapping[str, Any]) -> str:
    """Returns the text of a tool's result, or of its error."""
    if observation.get("error") is not None:
        return f"error: {observation['error']['message']}"
    result = observation["result"]
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        return "\n".join(part.get("text") or json.dumps(part) for part in result["content"])
    return _text(result)
