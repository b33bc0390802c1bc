"""The page's data: numbers by hand, growing files, and files that a resumed run truncates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.dashboard.view.run_view import RunView, open_runs
from megarl.files import truncate_lines
from tests.dashboard.status.directories import NOW, MadeRun
from tests.dashboard.view.viewed_run import (
    SCRIPT,
    add_lines,
    conversations,
    sample,
    span,
    step_samples,
    trace_lines,
    viewed_run,
)


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return viewed_run(tmp_path / "run")


@pytest.fixture
def view(run: MadeRun) -> RunView:
    return RunView(run.path, "run")


def ask(view: RunView, question: str, **query: object) -> Any:
    return view.answer(question, {name: str(value) for name, value in query.items()})


def test_metrics_come_in_increments_of_whole_lines(run: MadeRun, view: RunView) -> None:
    names = "objective/score,eval/score,none"
    first = ask(view, "series", names=names)["series"]
    assert first["eval/score"] == {"steps": [0, 20], "values": [0.25, 0.75]}
    assert first["objective/score"]["steps"] == list(range(1, 21))
    line = json.dumps({"step": 21, "objective/score": None, "objective/kl": 1 / 3})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(line[:9])
        file.flush()
        assert ask(view, "overview")["last_step"] == 20
        file.write(line[9:] + "\n")
    assert ask(view, "overview")["last_step"] == 21
    later = ask(view, "series", after=20)["series"]
    assert later["objective/score"] == {"steps": [21], "values": [None]}
    assert later["objective/kl"] == {"steps": [21], "values": [0.3333333]}
    assert later["eval/score"]["steps"] == []


def test_repeated_steps_of_a_resumed_run_replace_the_earlier_ones(run: MadeRun, view: RunView) -> None:
    assert ask(view, "overview")["generation"] == 0
    assert ask(view, "groups", kind="train", step=12)
    for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "prompt_scores.jsonl"):
        truncate_lines(run.path / name, lambda line: line["step"] <= 10)
    run.steps(12, ago=5, apart=1, first=11)
    add_lines(run.path / "samples.jsonl", [sample(11, "p9", 0, 0.5)])
    overview = ask(view, "overview")
    assert (overview["generation"], overview["last_step"], overview["progress"]["step"]) == (1, 12, 12)
    assert ask(view, "series", names="eval/score")["series"]["eval/score"]["steps"] == [0]
    assert [group["prompt_id"] for group in ask(view, "groups", kind="train", step=11)] == ["p9"]
    assert ask(view, "groups", kind="train", step=12) == []
    assert ask(view, "prompts")[0]["scores"] == {"match": [(0, 0.25)]}


def test_the_overview_has_findings_of_the_whole_run(run: MadeRun, view: RunView) -> None:
    run.step(21, ago=3, objective__score=0.0, rewards__unscored=3, rollout__samples=8)
    for step in range(22, 90):
        run.step(step, ago=2, objective__score=0.0, rewards__unscored=0, rollout__samples=8)
    (found, *_) = [finding for finding in ask(view, "overview")["findings"] if "no score" in finding["text"]]
    assert (found["first"], found["last"]) == (21, 21)


def test_groups_aggregate_their_samples(view: RunView) -> None:
    first, second = ask(view, "groups", kind="train", step=7)
    assert (first["score"], first["spread"], first["tokens"], first["cut_off"]) == (0.5, 1.0, 4.5, 1)
    assert (second["score"], second["spread"], second["samples"]) == (0.5, 0.0, 2)
    assert ask(view, "group", kind="train", step=7, prompt="p1") == step_samples(7)[:2]
    assert ask(view, "steps")["evaluation"] == [(0, 1), (20, 1)]


def test_branches_are_one_sample(view: RunView, run: MadeRun) -> None:
    """By hand: one conversation has branches of 4 and 4 tokens, the last of which was cut off; the other one has 5."""
    add_lines(run.path / "samples.jsonl", conversations(20))
    group = ask(view, "groups", kind="train", step=20)[-1]
    assert (group["samples"], group["score"], group["tokens"], group["cut_off"]) == (2, 0.75, 6.5, 1)
    assert ask(view, "steps")["train"][-1] == (20, 6)


def test_held_out_prompts_have_scores_answers_and_ids_of_their_own(view: RunView, run: MadeRun) -> None:
    (prompt,) = ask(view, "prompts")
    assert (prompt["prompt_id"], prompt["steps"]) == ("held", [0, 20])
    assert prompt["scores"] == {"match": [(0, 0.25), (20, 0.75)]}
    (answer,) = ask(view, "group", kind="evaluation", step=20, prompt="held")
    assert answer["response"] == "answer 20"
    other = {**sample(20, "p1", 0, 1.0, kind="evaluation"), "prompt": "another one"}
    add_lines(run.path / "samples.jsonl", [other])
    held_out = ask(view, "groups", kind="evaluation", step=20)
    assert [group["title"] for group in held_out if group["prompt_id"] == "p1"] == ["another one"]
    assert ask(view, "groups", kind="train", step=20)[0]["title"].startswith("say p1")
    assert ask(view, "prompts")[-1]["title"] == "another one"


def test_text_search_is_case_insensitive(view: RunView) -> None:
    def hits(text: str, **where: int) -> list[tuple[int, str]]:
        return [(group["step"], group["prompt_id"]) for group in ask(view, "search", kind="train", text=text, **where)]

    assert hits("WÖRD 17") == [(17, "p2")]
    assert hits("wörd 17", step=16) == []
    assert hits("say p1", step=3) == [(3, "p1")]
    assert len(hits("script")) == 40


def test_the_timeline_has_the_resolution_of_the_screen(view: RunView) -> None:
    whole = ask(view, "timeline", columns=1000)
    assert [row["name"] for row in whole["rows"]] == ["step", "driver", SCRIPT]
    assert whole["rows"][1]["spans"][:2] == [(0.0, 1.0, "rollout"), (1.0, 2.0, "update")]
    assert dict(whole["rows"][1]["seconds"]) == {"rollout": 20.0, "update": 20.0}
    part = ask(view, "timeline", start=2.5, end=4, columns=10)
    assert part["rows"][1]["spans"] == [(2.0, 3.0, "rollout"), (3.0, 4.0, "update")]
    assert part["rows"][1]["seconds"] == [("update", 1.0), ("rollout", 0.5)]
    assert max(len(row["spans"]) for row in ask(view, "timeline", columns=8)["rows"]) <= 16


def test_the_timeline_of_a_resumed_run_continues(run: MadeRun, view: RunView) -> None:
    trace = run.path / "trace.json"
    with trace.open("a") as file:
        file.write("]\n")
    assert ask(view, "timeline")["whole"] == 40
    trace.write_text(trace.read_text().removesuffix("]\n") + f",{json.dumps({**span(0, 'start', 50, 5), 'pid': 2})}\n")
    after = ask(view, "timeline")
    assert (after["whole"], after["rows"][-1]["attempt"], len(after["rows"])) == (55, 2, 4)


def test_the_timeline_has_ranks_in_their_order(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    events: list[dict[str, Any]] = []
    for row, name in enumerate(["driver", "train rank 10", "train rank 2", "rollout engine 0"]):
        events.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": name}})
        events.append(span(row, "update", 0, 1))
    (run.path / "trace.json").write_text("[" + "\n,".join(map(json.dumps, events)) + "\n")
    shown = [row["name"] for row in ask(RunView(run.path, "run"), "timeline")["rows"]]
    assert shown == ["driver", "rollout engine 0", "train rank 2", "train rank 10"]


def test_the_timeline_includes_the_part_before_a_rotation(run: MadeRun, view: RunView) -> None:
    """Also when the file is rotated again while the page is open."""
    trace, earlier = run.path / "trace.json", run.path / "trace.1.json"
    assert ask(view, "timeline")["whole"] == 40
    for start in (40, 50):
        trace.replace(earlier)
        name = {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "driver"}}
        trace.write_text(f"[{json.dumps(name)}\n,{json.dumps(span(0, 'update', start, 4))}\n")
        if start == 40:
            assert dict(ask(view, "timeline")["rows"][1]["seconds"]) == {"rollout": 20.0, "update": 24.0}
    after = ask(view, "timeline")
    assert [row["name"] for row in after["rows"]] == ["driver"]
    assert after["rows"][0]["spans"] == [(40.0, 44.0, "update"), (50.0, 54.0, "update")]
    fresh = RunView(run.path, "run")
    assert ask(fresh, "timeline")["rows"] == after["rows"]


def test_an_empty_run_has_empty_answers(tmp_path: Path) -> None:
    view = RunView(MadeRun(tmp_path / "run").path, "run")
    overview = ask(view, "overview")
    assert (overview["names"], overview["last_step"], overview["findings"]) == ([], 0, [])
    assert ask(view, "steps") == {"train": [], "evaluation": []}
    (tmp_path / "run" / "trace.json").write_text("".join(trace_lines(0)))
    assert ask(view, "timeline")["rows"] == ask(view, "prompts") == ask(view, "groups", kind="train", step=1) == []


def test_runs_with_the_same_name_are_distinguished(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c"]
    assert [view.name for view in open_runs(paths)] == [str(paths[0]), str(paths[1]), "c"]


def test_the_overview_has_state_skipped_rows_and_settings(run: MadeRun, view: RunView) -> None:
    overview = ask(view, "overview")
    assert (overview["stage"], overview["progress"]["steps"], overview["attempts"][0]["host"]) == ("ppo", 100, "n1")
    assert overview["limits"]["policy/approxkl"] == "< 0.05"
    assert overview["now"] > NOW
    assert ask(view, "left_out")["rows"][0]["reason"] == SCRIPT
    assert ask(view, "settings").items() >= {"stage": "ppo", "run.steps": 100}.items()
    with pytest.raises(KeyError):
        ask(view, "secrets")
