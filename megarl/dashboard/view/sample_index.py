"""The samples of a run: where they are in samples.jsonl, how held-out prompts were scored, and a table of all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from megarl.dashboard.status.reading import StatusError
from megarl.files import LineFollower, read_lines_at, write_errors
from megarl.run.paths import RunPaths

_TITLE = 120
"""Characters of a prompt that are kept."""
_ROWS: Final = 2000
"""Of a row group of a Parquet file."""
_SECTIONS: Final = ("scores", "tokens")
"""Fields whose entries are columns there."""
_BRANCH = re.compile(r"#\d+$")
"""Ends the sample id of a conversation's branch but the first."""


@dataclass(kw_only=True, slots=True)
class SampleGroup:
    """The samples of a prompt in a step: where their lines begin, and their numbers.

    The branches of a conversation are one sample: with the tokens of all, and the end of the last one.
    """

    starts: list[int] = field(default_factory=list[int])
    scores: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    cut_off: list[bool] = field(default_factory=list[bool])

    def add(self, start: int, line: Mapping[str, Any]) -> None:
        """Adds a line of the file, which begins at `start`."""
        self.starts.append(start)
        tokens = line.get("response_tokens") or 0
        cut_off = not line.get("finished", True)
        if self.cut_off and _BRANCH.search(str(line.get("sample_id"))):
            self.tokens[-1] += tokens
            self.cut_off[-1] = cut_off
            return
        self.tokens.append(tokens)
        self.cut_off.append(cut_off)
        if line.get("score") is not None:
            self.scores.append(line["score"])


class SampleIndex:
    """Follows the samples of a run."""

    def __init__(self, run: RunPaths) -> None:
        self._path = run.samples
        self._lines = LineFollower(run.samples)
        self._clear()

    def _clear(self) -> None:
        self._groups: dict[tuple[str, int], dict[str, SampleGroup]] = {}
        self.titles: dict[tuple[str, str], str] = {}  # by kind, as held-out prompts have numbers of their own

    def update(self) -> None:
        """Reads what has been written since the last call."""
        if self._lines.was_cut():
            self._clear()
        for start, line in self._lines.read():
            if not isinstance(line.get("step"), int) or "prompt_id" not in line:
                continue
            prompt = str(line["prompt_id"])
            kind = str(line.get("kind"))
            groups = self._groups.setdefault((kind, line["step"]), {})
            groups.setdefault(prompt, SampleGroup()).add(start, line)
            self.titles.setdefault((kind, prompt), str(line.get("prompt", ""))[:_TITLE])

    def steps(self, kind: str) -> list[tuple[int, int]]:
        """Returns the steps that have samples of a kind, each with their number."""
        found = sorted((step, groups) for (of, step), groups in self._groups.items() if of == kind)
        return [(step, sum(len(group.cut_off) for group in groups.values())) for step, groups in found]

    def groups(self, kind: str, step: int) -> list[dict[str, Any]]:
        """Returns the numbers of each prompt's samples in a step."""
        found = self._groups.get((kind, step), {})
        return [self._numbers(kind, step, prompt, group) for prompt, group in found.items()]

    def _numbers(self, kind: str, step: int, prompt: str, group: SampleGroup) -> dict[str, Any]:
        return {
            "step": step,
            "prompt_id": prompt,
            "title": self.titles[kind, prompt],
            "samples": len(group.cut_off),
            "score": fmean(group.scores) if group.scores else None,
            "spread": max(group.scores) - min(group.scores) if group.scores else None,
            "tokens": fmean(group.tokens),
            "cut_off": sum(group.cut_off),
        }

    def samples(self, kind: str, step: int, prompt: str) -> list[dict[str, Any]]:
        """Returns the samples of a prompt in a step, as in the file."""
        group = self._groups.get((kind, step), {}).get(prompt)
        return [] if group is None else read_lines_at(self._path, group.starts)

    def search(self, kind: str, text: str, most: int, step: int | None = None) -> list[dict[str, Any]]:
        """Returns the numbers of the groups that have a text, in any case, in the prompt or a response.

        Args:
            most: groups that are returned.
            step: None searches all.
        """
        steps = [found for found, _ in self.steps(kind)] if step is None else [step]
        hits: list[dict[str, Any]] = []
        for found, prompt, group in self._of(kind, steps):
            if any(_has(sample, text.lower()) for sample in read_lines_at(self._path, group.starts)):
                hits.append(self._numbers(kind, found, prompt, group))
                if len(hits) == most:
                    break
        return hits

    def _of(self, kind: str, steps: Sequence[int]) -> Iterator[tuple[int, str, SampleGroup]]:
        for step in steps:
            for prompt, group in self._groups.get((kind, step), {}).items():
                yield step, prompt, group

    def evaluated(self) -> dict[str, list[int]]:
        """Returns the steps after which each held-out prompt has answers here."""
        steps: dict[str, list[int]] = {}
        for step, prompt, _ in self._of("evaluation", [step for step, _ in self.steps("evaluation")]):
            steps.setdefault(prompt, []).append(step)
        return steps


def _has(sample: Mapping[str, Any], text: str) -> bool:
    return any(text in str(sample.get(name, "")).lower() for name in ("prompt", "response", "prompt_id"))


class HeldOutPrompts:
    """Follows the scores of held-out prompts: the mean of a prompt's responses, by prompt, reward and step."""

    def __init__(self, run: RunPaths) -> None:
        self._lines = LineFollower(run.prompt_scores)
        self._scores: dict[str, dict[str, dict[int, float]]] = {}

    def update(self) -> None:
        """Reads what has been written since the last call."""
        if self._lines.was_cut():
            self._scores.clear()
        for _, line in self._lines.read():
            for reward, scores in line.get("scores", {}).items():
                known = [score for score in scores if score is not None]
                if known:
                    by_reward = self._scores.setdefault(str(line["prompt_id"]), {})
                    by_reward.setdefault(reward, {})[line["step"]] = fmean(known)

    def prompts(self, samples: SampleIndex) -> list[dict[str, Any]]:
        """Returns the prompts that have answers to read, with their scores by reward: [step, mean] pairs."""
        return [
            {
                "prompt_id": prompt,
                "title": samples.titles["evaluation", prompt],
                "steps": steps,
                "scores": {name: list(of.items()) for name, of in self._scores.get(prompt, {}).items()},
            }
            for prompt, steps in samples.evaluated().items()
        ]


def export_samples(runs: Mapping[str, Path], path: Path) -> None:
    """Writes the samples of runs into a Parquet file.

    Args:
        runs: directories by name.

    Raises:
        StatusError: there are none.
        OSError: the file cannot be written.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    # Rewards and token values may come later in a run, so the columns are known at its end.
    groups = [(len(rows), pa.table(_columns(rows)).schema) for rows in _groups(runs)]
    found = [schema for _, schema in groups]
    if not found:
        raise StatusError(
            f"{', '.join(map(str, runs.values()))}: no samples: tracking.samples is 0, or none is there yet"
        )
    schema = pa.unify_schemas(found, promote_options="permissive")
    with write_errors(path), ParquetWriter(str(path), schema, compression="zstd") as writer:
        for (count, _), rows in zip(groups, _groups(runs), strict=False):  # a live run has more by now
            writer.write_table(pa.Table.from_pylist(rows[:count], schema))


def _groups(runs: Mapping[str, Path]) -> Iterator[list[dict[str, Any]]]:
    for name, run in runs.items():
        rows = ({"run": name, **_row(line)} for _, line in LineFollower(RunPaths(run).samples).read())
        while group := list(islice(rows, _ROWS)):
            yield group


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a sample without nesting; what has no type of its own, such as the row's other columns, is JSON."""
    row: dict[str, Any] = {}
    for name, value in line.items():
        if name in _SECTIONS:
            row |= {f"{name}/{part}": own for part, own in value.items()}
        elif name == "versions" or value is None or isinstance(value, str | int | float):
            row[name] = value
        else:
            row[name] = json.dumps(value, ensure_ascii=False)
    return row


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
