"""The HTTP server between a harness and the model, in the protocols of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from aiohttp import web
from pydantic import BaseModel, Field, PlainValidator, ValidationError

from megarl.config.schema import EnvironmentSettings
from megarl.conversations.chat_session import ChatSession
from megarl.conversations.gateway.connections import LOG, Connections
from megarl.conversations.gateway.gateway_anthropic import read_messages, stream_message, write_message
from megarl.conversations.gateway.gateway_openai import (
    read_chat,
    read_completion,
    read_response,
    stream_chat,
    stream_completion,
    stream_response,
    write_chat,
    write_completion,
    write_response,
)
from megarl.conversations.gateway.gateway_request import (
    GatewayConfig,
    GatewayError,
    GatewayReply,
    GatewayRequest,
    Json,
    RequestFields,
)
from megarl.conversations.gateway.gateway_session import GatewaySession, run_harness
from megarl.data.tokenizer import Tokenizer
from megarl.environments.environment import EnvironmentTask
from megarl.errors import RunError
from megarl.files import write_durably
from megarl.texts import argument_problems

_NO_SESSION = "the key is not that of a session that is in progress under this address"
_LARGEST_BODY = 8 << 20
_HEADER_S = 60.0
"""For the header of a request to come, on a new connection and after a request."""


_Text = Annotated[str, Field(min_length=1)]


def _check_command(value: Any) -> Any:
    words = (value,) if isinstance(value, str) else value
    if value is None:
        return value
    if isinstance(words, list | tuple) and words and all(isinstance(word, str) and word for word in words):
        return value
    raise ValueError("should be a text, a list of texts, or null")


class _Protocol(NamedTuple):
    read: Callable[[RequestFields], GatewayRequest]
    write: Callable[[GatewayReply], Json]
    stream: Callable[[GatewayReply], Iterator[Json]]


_PROTOCOLS: Mapping[str, _Protocol] = {
    "chat/completions": _Protocol(read_chat, write_chat, stream_chat),
    "completions": _Protocol(read_completion, write_completion, stream_completion),
    "responses": _Protocol(read_response, write_response, stream_response),
    "messages": _Protocol(read_messages, write_message, stream_message),
}


class GatewayArgs(BaseModel, extra="forbid", strict=True):
    """The environment's `args`.

    Args:
        command: words of a session's harness, or a text for the shell; None: a harness elsewhere
            takes tasks.
        model: name under which clients request the model.
        variables: names of extra environment variables to pass to harnesses, such as that of a key.
        override_sampling: whether requests of another temperature or the like are sampled as the
            run's, not refused.
        port: port to listen on; 0 is any free one.
        wait_limit: seconds without a request for a task, while tasks wait and no session is in
            progress.
    """

    command: Annotated[str | Sequence[str] | None, PlainValidator(_check_command)]
    model: _Text = "policy"
    variables: Sequence[_Text] = ()
    override_sampling: bool = False
    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    wait_limit: Annotated[float, Field(gt=0)] = 600.0


class Gateway:
    """Serves sessions; methods are called in one event loop.

    Raises:
        RunError: `environment.args` break a rule.
    """

    def __init__(self, environment: EnvironmentSettings, config: GatewayConfig, tokenizer: Tokenizer) -> None:
        try:
            self._args = GatewayArgs.model_validate(environment.args)
        except ValidationError as error:
            problems = argument_problems(error)
            raise RunError(f"environment.args of the gateway: {problems}") from error
        self._config = config
        self._tokenizer = tokenizer
        self._idle_s = environment.time_limit
        self._model = self._args.model
        self._sampling = replace(config.sampling, override=self._args.override_sampling)
        self._key = secrets.token_urlsafe(32)
        self._sessions: dict[str, GatewaySession] = {}
        self._waiting: deque[GatewaySession] = deque()
        self._active = time.monotonic()  # of harnesses elsewhere
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._connections: Connections
        self.url = ""

    async def start(self, host: str) -> None:
        """Listens, and writes the address and the run's key into the file, if a harness elsewhere needs them."""
        application = web.Application(middlewares=[self._guard], client_max_size=_LARGEST_BODY)
        application.router.add_post("/tasks/next", self._next_task)
        application.router.add_get("/{session}/task", self._task)
        application.router.add_post("/{session}/reward", self._reward)
        application.router.add_get("/{session}/v1/models", self._models)
        for path in _PROTOCOLS:
            application.router.add_post(f"/{{session}}/v1/{{protocol:{path}}}", self._turn)
        self._runner = runner = web.AppRunner(
            application,
            access_log=None,
            logger=LOG,
            shutdown_timeout=1.0,
            auto_decompress=False,
            keepalive_timeout=_HEADER_S,
            lingering_time=0,
        )
        await runner.setup()
        assert runner.server is not None
        self._connections = Connections(runner.server)
        self._listener = await self._connections.listen(host, self._args.port)
        self.url = f"http://{host}:{self._listener.sockets[0].getsockname()[1]}"
        if self._args.command is None:
            access = json.dumps({"url": self.url, "key": self._key})
            write_durably(Path(self._config.file), access, mode=0o600)

    async def close(self) -> None:
        """Ends harnesses in progress, and the server."""
        running = [session.running for session in self._sessions.values()]
        for conversation in running:
            conversation.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._listener is not None and self._runner is not None:
            self._listener.close()
            await self._runner.cleanup()

    async def converse(self, chat: ChatSession, task: EnvironmentTask) -> None:
        """Holds a conversation; a FailedEnvironmentError without a reward, a RunError if no harness takes tasks."""
        session = GatewaySession(chat, task, self._idle_s)
        self._sessions[session.name] = session
        try:
            if self._args.command is None:
                await self._taken(session)
                await session.over()
                self._active = time.monotonic()
            else:
                await run_harness(self._args.command, self._variables(session), session, self._args.variables)
            session.check(self._config.rewarded)
        except asyncio.CancelledError:  # the process ends, and the engines with it
            session.cancel()
            raise
        finally:
            del self._sessions[session.name]
            await session.close()

    async def _taken(self, session: GatewaySession) -> None:
        """Returns when a harness elsewhere has taken the task."""
        self._waiting.append(session)
        began = time.monotonic()
        try:
            while session in self._waiting:
                remaining = self._args.wait_limit
                if len(self._sessions) == len(self._waiting):  # no session is in progress
                    remaining -= time.monotonic() - max(began, self._active)
                if remaining <= 0:
                    raise RunError(
                        f"environment: no harness has asked {self.url} for a task in {self._args.wait_limit:g} s: "
                        f"start one with {self._config.file}, or give environment.args another wait_limit"
                    )
                with suppress(TimeoutError):
                    await asyncio.wait_for(session.taken.wait(), remaining)
        finally:
            if session in self._waiting:
                self._waiting.remove(session)

    def _variables(self, session: GatewaySession) -> dict[str, str]:
        """Returns what a harness finds in its environment."""
        url = f"{self.url}/{session.name}"
        direct = self.url.removeprefix("http://").rpartition(":")[0]
        if os.environ.get("NO_PROXY"):
            direct = f"{os.environ['NO_PROXY']},{direct}"
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.key,
            "MEGARL_MODEL": self._model,
            "MEGARL_SESSION_URL": url,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuses whoever lacks the key, and reports errors in the client's own format."""
        try:
            self._check_key(request)
            self._connections.authenticated(request)
            return await handler(request)
        except GatewayError as error:
            return _error(request, error.status, str(error))
        except web.HTTPException as error:
            return _error(request, error.status, f"{request.method} {request.path}: {error.reason}")
        except (ValueError, RecursionError) as error:
            return _error(request, 400, str(error))
        except asyncio.CancelledError:
            return _error(request, 401, "the session has ended")
        except Exception:
            traceback.print_exc()
            return _error(request, 500, "the gateway failed; see its log")

    def _check_key(self, request: web.Request) -> None:
        given = request.headers.get("x-api-key")
        if not given:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = ""
        session = self._sessions.get(request.path.removeprefix("/").partition("/")[0])
        if request.path == "/tasks/next":
            key = self._key
        elif session is not None:
            key = session.key
        if not key or not secrets.compare_digest(given.encode(), key.encode()):
            raise GatewayError(_NO_SESSION, 401)

    async def _turn(self, request: web.Request) -> web.Response:
        session = self._session(request)
        protocol = _PROTOCOLS[request.match_info["protocol"]]
        body = await _body(request)
        turn = await asyncio.to_thread(self._read, body, protocol, session)
        turns, created = await session.answered(turn)
        reply = GatewayReply(
            request=turn,
            turns=turns,
            created=created,
            model=self._model,
            decode=partial(self._tokenizer.decode, special=True),
        )
        if turn.stream:
            return _stream(protocol.stream(reply))
        return web.json_response(protocol.write(reply))

    def _read(self, body: bytes, protocol: _Protocol, session: GatewaySession) -> GatewayRequest:
        """Reads a request for turns."""
        sampling = self._sampling
        if session.sample.temperature is not None:
            sampling = replace(sampling, temperature=session.sample.temperature)
        fields = RequestFields(_parsed(body), sampling, self._model, session.call_ids)
        turn = protocol.read(fields)
        last = len(self._tokenizer) - 1
        if isinstance(turn.prompt, tuple) and max(turn.prompt) > last:
            raise GatewayError(f"prompt: {max(turn.prompt)} is no token id: they end at {last}")
        return turn

    async def _models(self, request: web.Request) -> web.Response:
        """Lists the model, with OpenAI's fields and Anthropic's."""
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "megarl"}
        model |= {"type": "model", "display_name": self._model, "created_at": "1970-01-01T00:00:00Z"}
        ends = {"first_id": self._model, "last_id": self._model, "has_more": False}
        return web.json_response({"object": "list", "data": [model], **ends})

    async def _task(self, request: web.Request) -> web.Response:
        return web.Response(text=self._session(request).task, content_type="application/json")

    async def _reward(self, request: web.Request) -> web.Response:
        body = _parsed(await _body(request))
        value = body.pop("reward", None)
        done = body.pop("done", False)
        failure = body.pop("failed", None)
        number = value is None or (type(value) in (int, float) and abs(value) < 1e30)
        if not number or not isinstance(done, bool) or not isinstance(failure, str | None) or body:
            rule = "{reward: a finite number, done: true or false, failed: a text}"
            raise GatewayError(f"a reward is posted as {rule}")
        session = self._session(request)
        if failure is not None:
            session.fail(failure)
        else:
            session.reward(None if value is None else float(value), done)
        return web.json_response({"ok": True})

    async def _next_task(self, request: web.Request) -> web.Response:
        """Gives the task that has waited longest to a harness elsewhere; 204 without one."""
        self._active = time.monotonic()
        if not self._waiting:
            return web.Response(status=204)
        session = self._waiting.popleft()
        session.begin()
        session.taken.set()
        given = {"task": json.loads(session.task), "session_url": f"{self.url}/{session.name}"}
        return web.json_response({**given, "key": session.key, "model": self._model})

    def _session(self, request: web.Request) -> GatewaySession:
        """Returns the session of a request; it may have ended while the body came."""
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise GatewayError(_NO_SESSION, 401)
        return session


async def _body(request: web.Request) -> bytes:
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise GatewayError(f"Content-Encoding: {encoding}: send the body as it is", 415)
    return await request.read()


def _parsed(text: bytes) -> Json:
    try:
        body: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GatewayError(f"the body is not JSON: {error!s:.200}") from error
    if not isinstance(body, dict):
        raise GatewayError("the body must be a JSON object")
    return body


def _stream(events: Iterator[Json]) -> web.Response:
    """Returns server-sent events: the turn is whole when the first one goes, so that an error has its status."""
    sent = ""
    event: Json = {}
    for event in events:
        if "type" in event:
            sent += f"event: {event['type']}\n"
        sent += f"data: {json.dumps(event)}\n\n"
    if "type" not in event:
        sent += "data: [DONE]\n\n"
    return web.Response(text=sent, content_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _error(request: web.Request, status: int, message: str) -> web.Response:
    kinds = {401: "authentication_error", 404: "not_found_error", 500: "api_error"}
    error = {"type": kinds.get(status, "invalid_request_error"), "message": message}
    body: Json = {"error": {**error, "param": None, "code": None}}
    if request.path.endswith("/v1/messages") or "anthropic-version" in request.headers:
        body = {"type": "error", "error": error}
    response = web.json_response(body, status=status)
    if status == 401:
        response.force_close()  # nothing is read of the rest
    return response
