"""The served page and the exported one: access and contents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.dashboard.view.page_export import _thinned, export, key
from megarl.dashboard.view.page_server import PageServer
from megarl.dashboard.view.run_view import RunView
from tests.dashboard.view.viewed_run import SCRIPT, served, viewed_run


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    return RunView(viewed_run(tmp_path / "run").path, "run")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    with served(viewed_run(tmp_path / "run")) as server:
        yield server


def get(server: PageServer, path: str, host: str = "127.0.0.1") -> tuple[int, str, str]:
    """Returns status, type and text of an answer."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    found = answer.status, answer.headers["Content-Type"], answer.read().decode()
    connection.close()
    return found


def test_requests_with_the_token_get_the_page(server: PageServer) -> None:
    status, kind, page = get(server, f"/{server.token}/", "localhost:8000")
    assert (status, kind, server.server_address[0]) == (200, "text/html; charset=utf-8", "127.0.0.1")
    assert page == server.page
    assert not re.search(r"(src|href)=.?(http|//)", page)


@pytest.mark.parametrize(
    ("path", "host"),
    [("/", "127.0.0.1"), ("/x/api/overview", "127.0.0.1"), ("/TOKEN/", "evil.example"), ("//[", "["), ("/TOKEN/", "")],
)
def test_requests_without_the_token_are_refused(server: PageServer, path: str, host: str) -> None:
    status, _, text = get(server, path.replace("TOKEN", server.token), host)
    assert status == 403
    assert server.token not in text


def test_questions_are_answered_in_json(server: PageServer) -> None:
    def ask(question: str) -> Any:
        status, kind, text = get(server, f"/{server.token}/api/{question}")
        assert (status, kind) == (200, "application/json; charset=utf-8")
        return json.loads(text)

    assert ask("runs") == 1
    assert ask("overview?run=0")["progress"]["step"] == 20
    assert ask("group?run=0&kind=train&step=3&prompt=p1")[0]["response"] == SCRIPT


@pytest.mark.parametrize(
    "question", ["nothing", "overview?run=9", "groups?kind=train", "groups?kind=train&step=x", "timeline?start=4&end=3"]
)
def test_other_questions_are_refused(server: PageServer, question: str) -> None:
    assert get(server, f"/{server.token}/api/{question}")[0] == 400


def exported(view: RunView, path: Path) -> dict[str, Any]:
    """Returns the answers in the page to keep."""
    export([view], path)
    page = path.read_text()
    assert page.count("<script") == page.count("</script>") == 2
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(data)["answers"]


def prompts_by_step(answers: dict[str, Any], kind: str = "train") -> dict[int, list[str]]:
    steps = [groups for question, groups in answers.items() if question.startswith(f"groups?kind={kind}&")]
    return {groups[0]["step"]: [group["prompt_id"] for group in groups] for groups in steps}


def test_the_exported_page_contains_the_answers(view: RunView, tmp_path: Path) -> None:
    answers = exported(view, tmp_path / "page.html")
    assert answers["series?run=0"]["series"]["eval/score"]["values"] == [0.25, 0.75]
    assert answers["group?kind=train&prompt=p1&run=0&step=20"][0]["response"] == SCRIPT
    assert answers["timeline?run=0"]["whole"] == 40
    assert key("group", {"step": "1", "kind": "train"}) == "group?kind=train&step=1"


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (9000, {20: ["p1", "p2"], 19: ["p1", "p2"], 18: ["p1", "p2"], 17: ["p1"]}),
        (1100, {20: ["p1"]}),
        (10, {20: ["p1"]}),
    ],
)
def test_of_too_many_samples_those_of_the_last_steps_are_exported(
    view: RunView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, expected: dict[int, list[str]]
) -> None:
    monkeypatch.setattr("megarl.dashboard.view.page_export._SAMPLES_BYTES", 2 * nbytes)
    answers = exported(view, tmp_path / "page.html")
    assert prompts_by_step(answers) == expected
    assert len(answers["group?kind=train&prompt=p1&run=0&step=20"]) == 2
    assert prompts_by_step(answers, "evaluation")[20] == ["held"]


def test_long_curves_are_thinned() -> None:
    steps = list(range(1, 4501))
    thin = _thinned({"steps": steps, "values": [float(step) for step in steps]})
    assert (thin["steps"][:2], thin["steps"][-1], len(thin["steps"])) == ([1, 4], 4500, 1501)
    assert thin["values"] == thin["steps"]
    assert _thinned({"steps": [1], "values": [2.0]}) == {"steps": [1], "values": [2.0]}


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    run, page = viewed_run(tmp_path / "run").path, tmp_path / "page.html"
    done = CliRunner().invoke(app, ["view", str(run), "--export", str(page)])
    assert (done.exit_code, page.exists()) == (0, True)
    missing = CliRunner().invoke(app, ["view", str(tmp_path / "rum"), "--export", str(page)])
    assert missing.exit_code == 2
    assert "run" in missing.output
    unwritable = CliRunner().invoke(app, ["view", "rum", "--export", str(tmp_path / "none" / "page.html")])
    assert (unwritable.exit_code, unwritable.output) == (
        2,
        f"--export: {tmp_path / 'none'} must be a writable directory; make it, or choose another\n",
    )  # before the run is read
    assert CliRunner().invoke(app, ["view", str(run), "--export", str(tmp_path)]).exit_code == 2
    assert CliRunner().invoke(app, ["view", str(run), "--port", "70000"]).exit_code == 2
