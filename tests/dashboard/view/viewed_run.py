"""A directory with everything that the page shows, and texts that it must not interpret."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from megarl.dashboard.view.page_server import PageServer
from megarl.dashboard.view.run_view import RunView
from tests.dashboard.status.directories import MadeRun

SCRIPT = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
TURNED = "a\u202eb\u0007c"


def viewed_run(path: Path, steps: int = 20) -> MadeRun:
    """Returns a run of 100 steps that took some, with two prompts of two responses each, and two evaluations."""
    run = MadeRun(path)
    run.start(1, ago=600)
    run.steps(steps, ago=10, apart=20)
    for step, score in ((0, 0.25), (steps, 0.75)):
        run.evaluation(step, ago=5, score=score, score_ci95=0.05)
        held_out = sample(step, "held", 0, score, kind="evaluation", response=f"answer {step}")
        add_lines(path / "samples.jsonl", [held_out])
        scores = {"step": step, "prompt_id": "held", "scores": {"match": [score, None]}}
        add_lines(path / "prompt_scores.jsonl", [scores])
    for step in range(1, steps + 1):
        add_lines(path / "samples.jsonl", step_samples(step))
    (path / "trace.json").write_text("".join(trace_lines(steps)))
    left_out = {"field": "data.prompts", "where": "a.jsonl:3", "fault": "empty", "reason": SCRIPT}
    add_lines(path / "left_out.jsonl", [left_out])
    return run


@contextmanager
def served(*runs: MadeRun) -> Iterator[PageServer]:
    """A server of the page of some runs, which are named like their directories."""
    with PageServer([RunView(run.path, run.path.name) for run in runs]) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def step_samples(step: int) -> list[dict[str, Any]]:
    letters = {
        "text": ["wörd ", SCRIPT, "\u200f", "given"],
        "rollout_logprobs": [-1.0, -2.0, -0.5, None],
        "old_logprobs": [-1.0, -1.5, -0.5, None],
        "ratio": [1.0, 1.5, 0.75, None],
        "clipped": [0.0, 1.0, 0.0, None],
        "actor_mask": [1.0, 0.0, 1.0, None],
        "loss_mask": [1, 1, 1, 0],
    }
    return [
        sample(step, "p1", 0, 1.0, response=SCRIPT),
        sample(step, "p1", 1, 0.0, response=TURNED, finished=False),
        {**sample(step, "p2", 0, 0.5, response=f"wörd {step}"), "tokens": letters},
        sample(step, "p2", 1, None, response=""),
    ]


def conversations(step: int) -> list[dict[str, Any]]:
    """One of two branches, the first of which has values of tokens; and one that failed."""
    request, answered = turn("?c", 3, reward=0.25), turn(f"={SCRIPT}>", 2)
    outcome = {"turns": 3, "truncated": True, "failure": None, "metrics": {"asked": 2.0}}
    tokens = {
        "text": ["?", "c", "<eos>", "=", SCRIPT],
        "rollout_logprobs": [-1.0, -2.0, -0.5, None, None],
        "loss_mask": [1, 1, 1, 0, 0],
    }
    first = {**sample(step, "talk", 0, 0.75), "turns": [request, answered], "outcome": outcome, "tokens": tokens}
    answer = {**sample(step, "talk", 0, 0.75, finished=False), "sample_id": f"{step}/talk/0#1", "prompt": "rewritten"}
    failed = {"turns": 0, "truncated": False, "failure": f"RuntimeError: {SCRIPT}", "metrics": {}}
    return [
        first,
        {**answer, "turns": [turn("47", 2, reward=0.5), turn("", 0, reward=0.0)], "outcome": outcome},
        {**sample(step, "talk", 1, None), "turns": [], "outcome": failed},
    ]


def turn(text: str, tokens: int, reward: float | None = None) -> dict[str, Any]:
    """A turn of the model, or without a reward what was given."""
    return {"sampled": reward is not None, "text": text, "tokens": tokens, "reward": reward}


def sample(
    step: int,
    prompt: str,
    number: int,
    score: float | None,
    *,
    kind: str = "train",
    response: str = "",
    finished: bool = True,
) -> dict[str, Any]:
    """A line of samples.jsonl."""
    return {
        "step": step,
        "kind": kind,
        "sample_id": f"{step}/{prompt}/{number}",
        "prompt_id": prompt,
        "prompt": f"say {prompt} {SCRIPT}",
        "response": response,
        "text": None,
        "fields": {"answer": SCRIPT},
        "prompt_tokens": 3,
        "response_tokens": 4 + number,
        "versions": [step - 1],
        "finished": finished,
        "score": score,
        "scores": {"match": score},
        "advantage": None if kind == "evaluation" else 0.5,
    }


def trace_lines(steps: int) -> Iterable[str]:
    """Each step takes 2 s: the driver updates in the second one, which a rank waits for."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "driver"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": SCRIPT}},
    ]
    for step in range(steps):
        events += [span(0, "rollout", 2 * step, 1), span(0, "update", 2 * step + 1, 1), span(1, "wait", 2 * step, 1)]
        events += [span(1, "actor.update", 2 * step + 1, 1), span(0, f"step {step + 1}", 2 * step, 2)]
    for number, event in enumerate(events):
        yield f"{',' if number else '['}{json.dumps(event)}\n"


def span(row: int, name: str, start: float, took: float) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": row, "name": name, "ts": 1e6 * start, "dur": 1e6 * took, "args": {"step": 1}}


def add_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
