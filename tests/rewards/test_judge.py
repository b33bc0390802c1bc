"""The judge against a server of the test's own."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from examples.sort_letters.checkpoint import write_checkpoint
from megarl.config.schema import JudgeModel, Reward, RewardFunction
from megarl.data.tokenizer import load_tokenizer
from megarl.preflight.user_functions import check_fields, check_functions
from megarl.rewards.functions import judge
from megarl.rewards.judge import JudgePrompts
from megarl.rewards.scorer import RuleScorer
from tests.rewards.completions import completion, prompt

pytestmark = pytest.mark.process  # OpenAI's client asks uname for the machine

Respond = Callable[[int, str], tuple[int, Any]]
TEMPLATE = "Q: {prompt} A: {response} Right: {answer} Reply {{score: x}}."


def chat(text: str | None, reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


@dataclass
class Server:
    """Answers a request, given its number and its question, with a status and JSON, or a text as it is.

    Args:
        most: requests that were in progress at once.
        holds: seconds that a request takes.
    """

    respond: Respond = lambda number, question: (200, chat("score: 1"))
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    holds: float = 0.0
    busy: int = 0
    most: int = 0
    url: str = ""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    own, lock = Server(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(own.requests)
                own.requests.append(body)
                own.keys.append(self.headers.get("authorization"))
                own.busy += 1
                own.most = max(own.most, own.busy)
            time.sleep(own.holds)
            status, reply = own.respond(number, body["messages"][0]["content"])
            with lock:
                own.busy -= 1
            data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
            self.send_response(status if self.path == "/v1/chat/completions" else 404)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, *_: object) -> None:
            """The client has gone, as in the test of the time limit."""

    listener = Listener(("127.0.0.1", 0), Handler)
    own.url = f"http://127.0.0.1:{listener.server_port}/v1"
    threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
    yield own
    listener.shutdown()
    listener.server_close()


def ask(server: Server, response: str = "4", **given: Any) -> float:
    args = {"url": server.url, "model": "grader", "template": TEMPLATE, "pattern": r"score: (\S+)", **given}
    return asyncio.run(judge(completion(response, answer="four"), **args))


def test_the_question_is_the_filled_template_and_the_score_the_last_match(server: Server) -> None:
    server.respond = lambda number, question: (200, chat("score: 9 would be too much\nscore: 0.25"))
    assert ask(server, response="{answer} {0.__class__}", options={"max_tokens": 7}) == 0.25
    text = "Q: question A: {answer} {0.__class__} Right: four Reply {score: x}."
    assert server.requests == [{"model": "grader", "messages": [{"role": "user", "content": text}], "max_tokens": 7}]
    ask(server)
    assert server.requests[1]["temperature"] == 0
    assert server.keys == ["Bearer EMPTY"] * 2


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_a_busy_or_failing_endpoint_is_asked_again(server: Server, status: int) -> None:
    server.respond = lambda number, question: (200, chat("score: 3")) if number == 2 else (status, "later")
    assert ask(server) == 3
    assert len(server.requests) == 3


def test_an_attempt_ends_at_its_time_limit_and_is_repeated(server: Server) -> None:
    late = threading.Event()

    def first_hangs(number: int, question: str) -> tuple[int, Any]:
        if number == 0:
            late.wait(30)
        return 200, chat("score: 2")

    server.respond = first_hangs
    assert ask(server, timeout=0.3) == 2
    late.set()
    assert len(server.requests) == 2


def test_an_endpoint_that_cannot_be_reached_is_a_failure(server: Server) -> None:
    with pytest.raises(RuntimeError, match="did not answer in 2 attempts: APIConnectionError"):
        ask(server, url="http://127.0.0.1:1/v1", attempts=2)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (chat("no idea"), "no number"),
        (chat("score: high"), "no number"),
        (chat("score: 1", reason="length"), "has no end"),
        (chat(None), "has no end"),
        ({"choices": []}, "no chat completion"),
        ([1], "no chat completion"),
        ("<html>", "no chat completion"),
    ],
)
def test_an_answer_that_cannot_be_read_is_a_failure(server: Server, reply: Any, problem: str) -> None:
    server.respond = lambda number, question: (200, reply)
    with pytest.raises((RuntimeError, ValueError), match=problem):
        ask(server)
    assert len(server.requests) == 1


def test_the_key_is_of_the_environment_and_not_in_messages(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER", " sk-77\n")
    assert ask(server, key_variable="GRADER") == 1
    server.respond = lambda number, question: (401, {"error": {"message": "wrong key sk-77"}})
    with pytest.raises(RuntimeError, match=r"wrong key \(secret\)"):
        ask(server, key_variable="GRADER")
    assert server.keys == ["Bearer sk-77"] * 2
    for value in ("", "sk\n77", "schlüssel"):
        monkeypatch.setenv("GRADER", value)
        with pytest.raises(ValueError, match="environment variable GRADER"):
            ask(server, key_variable="GRADER")
    monkeypatch.delenv("GRADER")
    with pytest.raises(ValueError, match="environment variable GRADER"):
        ask(server, key_variable="GRADER")


def test_calls_overlap_up_to_the_limit_and_equal_responses_are_asked_once(server: Server) -> None:
    server.holds = 0.2
    server.respond = lambda number, text: (200, chat("none" if text == "xxx ?" else f"score: {len(text)}"))
    args = {"url": server.url, "model": "m", "template": "{response} ?", "pattern": r"score: (\d+)"}
    function = RewardFunction(name="judge", args=args, concurrency=4, cache=True)
    scorer = RuleScorer([function], None, Reward(retries=0))
    rows = [replace(completion("x" * (index % 8)), prompt_id=f"{index % 8}") for index in range(16)]
    scores, failures = scorer.score({"judge": 0}, rows, time.monotonic() + 60)
    scorer.close()
    expected = [math.nan if index == 3 else index + 2.0 for index in range(8)] * 2
    assert str(scores["judge"].tolist()) == str(expected)
    assert (server.most, len(server.requests)) == (4, 8)
    assert failures["judge", "ValueError"].prompt_id == "3"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("url", "localhost:80", "an address"),
        ("url", "https://me:secret@host/v1", "without user"),
        ("template", "{prompt}", "{response}"),
        ("template", "{response} {answer", "doubled"),
        ("template", "{response} {}", "doubled"),
        ("template", "{response} {answer.__class__}", "doubled"),
        ("template", "{response} {answer!r}", "doubled"),
        ("pattern", "no group", "one group"),
        ("options", {"model": "x"}, "without model"),
        ("timeout", 0.0, "greater than 0"),
        ("attempts", 0, "greater than or equal to 1"),
    ],
)
def test_mistakes_are_found_before_a_run(name: str, value: Any, rule: str) -> None:
    args = {"url": "http://h/v1", "model": "m", "template": TEMPLATE, "pattern": "(x)", name: value}
    (problem,) = check_functions([RewardFunction(name="judge", args=args)])
    assert problem.field == f"reward.functions.0.args.{name}"
    assert rule in problem.rule


def test_columns_that_rows_lack_are_found_before_a_run() -> None:
    args = {"url": "http://h/v1", "model": "m", "template": TEMPLATE, "pattern": "(x)"}
    rows = [prompt("a", answer="x"), prompt("b", key="y")]
    (problem,) = check_fields([RewardFunction(name="judge", args=args)], rows)
    assert (problem.field, problem.value) == ("reward.functions.0.args.template", "answer")
    assert "1 of 2 lack it, the first is 'b'" in problem.rule


def test_questions_of_the_own_judge_have_room_and_its_answers_an_end(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 0)
    settings = JudgeModel(
        path=str(tmp_path), devices="0", template="{response}=", pattern=r"(\d)", max_new_tokens=4, max_model_len=16
    )
    prompts = JudgePrompts(settings)
    ids, problem = prompts.ask(completion(response="abc"))
    assert problem is None
    assert load_tokenizer(tmp_path).decode(ids) == "abc="
    assert "has 14 tokens, and from 1 to 12 have room" in str(prompts.ask(completion(response="a" * 12))[1])
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].role }}:{{ messages[0].content }}")
    chat, _ = JudgePrompts(settings).ask(completion(response="b"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(chat) == "user:b="
    assert prompts.read(tokenizer.encode("is 3"), True) == 3
    with pytest.raises(ValueError, match="has no end in"):
        prompts.read(tokenizer.encode("is 3"), False)
