"""The samples of a run: where they are in samples.jsonl, and how held-out prompts were scored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megarl.files import JsonObject, LineFollower, read_lines_at
from megarl.run.paths import RunPaths

_TITLE = 120
"""Characters of a prompt that are kept."""
_BRANCH = re.compile(r"#\d+$")
"""Ends the sample id of a conversation's branch but the first."""


@dataclass(kw_only=True, slots=True)
class SampleGroup:
    """The samples of a prompt in a step: where their lines begin, and their numbers.

    The branches of a conversation are one sample: with the tokens of all, and the end
    of the last one.
    """

    starts: list[int] = field(default_factory=list[int])
    scores: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    cut_off: list[bool] = field(default_factory=list[bool])

    def add(self, start: int, line: Mapping[str, Any]) -> None:
        """Adds the line that begins at `start`."""
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
    """Follows the samples of a run, and the scores of held-out prompts."""

    def __init__(self, run: RunPaths) -> None:
        self._path = run.samples
        self._lines = LineFollower(run.samples)
        self._scored = LineFollower(run.prompt_scores)
        self._scores: dict[str, dict[str, dict[int, float]]] = {}  # by prompt, reward and step
        self._clear()

    def _clear(self) -> None:
        self._groups: dict[tuple[str, int], dict[str, SampleGroup]] = {}
        self._titles: dict[tuple[str, str], str] = {}  # by kind: ids may be the same

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
            self._titles.setdefault((kind, prompt), str(line.get("prompt", ""))[:_TITLE])

    def steps(self, kind: str) -> list[tuple[int, int]]:
        """Returns the steps that have samples of a kind, each with their number."""
        found: list[tuple[int, int]] = []
        for (group_kind, step), groups in self._groups.items():
            if group_kind == kind:
                found.append((step, sum(len(group.cut_off) for group in groups.values())))
        return sorted(found)

    def groups(self, kind: str, step: int) -> list[JsonObject]:
        """Returns the numbers of each prompt's samples in a step."""
        found = self._groups.get((kind, step), {})
        return [self._numbers(kind, step, prompt) for prompt in found]

    def _numbers(self, kind: str, step: int, prompt: str) -> JsonObject:
        group = self._groups[kind, step][prompt]
        score = None
        spread = None
        if group.scores:
            score = fmean(group.scores)
            spread = max(group.scores) - min(group.scores)
        return {
            "step": step,
            "prompt_id": prompt,
            "title": self._titles[kind, prompt],
            "samples": len(group.cut_off),
            "score": score,
            "spread": spread,
            "tokens": fmean(group.tokens),
            "cut_off": sum(group.cut_off),
        }

    def samples(self, kind: str, step: int, prompt: str) -> list[JsonObject]:
        """Returns the samples of a prompt in a step, as in the file."""
        group = self._groups.get((kind, step), {}).get(prompt)
        if group is None:
            return []
        return read_lines_at(self._path, group.starts)

    def search(self, kind: str, text: str, max_hits: int, step: int | None = None) -> list[JsonObject]:
        """Returns the numbers of the groups that have a text, in any case, in the prompt or a response."""
        steps = [step] if step is not None else [found for found, _ in self.steps(kind)]
        hits: list[JsonObject] = []
        for found in steps:
            for prompt in self._groups.get((kind, found), {}):
                if len(hits) < max_hits and _any_has(self.samples(kind, found, prompt), text.lower()):
                    hits.append(self._numbers(kind, found, prompt))
        return hits

    def prompts(self) -> list[JsonObject]:
        """Returns the held-out prompts with answers, and mean scores by reward: [step, mean] pairs."""
        if self._scored.was_cut():
            self._scores.clear()
        for _, line in self._scored.read():
            by_reward = self._scores.setdefault(str(line["prompt_id"]), {})
            for reward, score in mean_scores(line):
                by_reward.setdefault(reward, {})[line["step"]] = score
        steps: dict[str, list[int]] = {}
        for step, _ in self.steps("evaluation"):
            for prompt in self._groups["evaluation", step]:
                steps.setdefault(prompt, []).append(step)
        found: list[JsonObject] = []
        for prompt in steps:
            title = self._titles["evaluation", prompt]
            by_reward = self._scores.get(prompt, {})
            scores = {name: list(by_step.items()) for name, by_step in by_reward.items()}
            entry = {"prompt_id": prompt, "title": title, "steps": steps[prompt], "scores": scores}
            found.append(entry)
        return found


def _any_has(samples: Sequence[Mapping[str, Any]], text: str) -> bool:
    for sample in samples:
        for name in ("prompt", "response", "prompt_id"):
            if text in str(sample.get(name, "")).lower():
                return True
    return False


def mean_scores(line: JsonObject) -> Iterator[tuple[str, float]]:
    """Yields the mean of a prompt's scores by reward, from a line of prompt_scores.jsonl."""
    for reward, scores in line.get("scores", {}).items():
        known = [score for score in scores if score is not None]
        if known:
            yield reward, fmean(known)
