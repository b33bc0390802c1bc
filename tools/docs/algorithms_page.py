"""The page that lists every algorithm, generated from the functions; run as a script, it prints the page."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from megarl.algos import (
    advantages,
    kl,
    metrics,
    normalization,
    optimization,
    reward_shaping,
    rollout_correction,
    value_loss,
)
from megarl.algos.group_advantages import Samples
from megarl.algos.normalization import Groups
from megarl.algos.policy_loss import LossTerms
from megarl.algos.registry import KINDS, Kind
from megarl.algos.signatures import REQUIRED, Signature
from megarl.rewards.functions import soft_overlong

INTRODUCTION = Path(__file__).with_name("algorithms.md")
_RECORDS = (Samples, Groups, LossTerms)


PARTS: Final[dict[str, list[tuple[str, Callable[..., Any]]]]] = {
    "Scores": [
        ("algo.scores.clip", reward_shaping.clip_scores),
        ("algo.scores.truncate_at", reward_shaping.first_end),
        ("algo.scores.missing_end: mask", reward_shaping.keep_finished),
        ("reward.functions: soft_overlong", soft_overlong),
    ],
    "Rewards of tokens": [
        ("algo.kl.coef", reward_shaping.kl_penalties),
        ("algo.kl.target", kl.KLController),
        ("algo.scores.placement", reward_shaping.token_rewards),
        ("reward.dense", reward_shaping.dense_rewards),
        ("algo.normalise.rewards", normalization.whiten_rewards),
        ("algo.kl.cumulative", advantages.broadcast_advantages),
    ],
    "Rollouts of another policy": [
        ("algo.correction.old_logprobs", rollout_correction.proximal_logprobs),
        ("algo.correction.reject", rollout_correction.rejection),
        ("algo.correction.sequence_mask", rollout_correction.off_policy_sequences),
        ("algo.correction.m2po", rollout_correction.m2po),
    ],
    "Optimizer steps": [
        ("algo.mini_batches", optimization.divided),
        ("algo.early_stop", optimization.exceeds_target),
        ("ptx.mode", optimization.ptx_shares),
        ("actor.ema", optimization.ema),
        ("algo.kl.reference_sync", optimization.ema),
        ("actor.optimizer.adam: tensorflow", optimization.tensorflow_eps),
        ("actor.optimizer.schedule: anneal", optimization.linear_anneal),
    ],
    "Values": [("critic.value_norm", value_loss.ValueMoments.update)],
    "Scale of reward models": [
        ("reward.head_std", reward_shaping.head_std),
        ("normalisation", reward_shaping.score_scale),
    ],
    "Evaluations": [
        ("evaluation.pass_at", metrics.pass_rate),
        ("evaluation.samples_per_prompt", metrics.clustered_mean),
    ],
}
"""Algorithms without names, by title of the section: the field, with a choice, that turns each on."""


def markdown() -> str:
    """Returns the whole page."""
    parts = [INTRODUCTION.read_text(encoding="utf-8").replace("{kinds}", _kinds()).replace("{records}", _records())]
    described = set[str]()

    def begin(title: str, modules: set[str]) -> None:
        """Adds a heading, and the docstring of the functions' module if they have the same one."""
        heading = f"## {title}\n"
        if len(modules) == 1:
            for name in modules - described:
                heading += f"\n{_listed(inspect.getdoc(import_module(name)) or '')}\n"
        described.update(modules)
        parts.append(heading)

    for kind in KINDS:
        begin(f"{kind.title}: `{kind.field}`", {f"megarl.algos.{kind.module}"})
        parts += _functions(kind)
    for title, items in PARTS.items():
        places: dict[Callable[..., Any], list[str]] = defaultdict(list)
        for place, function in items:
            places[function].append(f"`{place}`")
        begin(title, {function.__module__ for function in places})
        for function, fields in places.items():
            parts.append(f"### {', '.join(fields)}\n\n{_text(function)}\n")
    return "\n".join(parts)


def _kinds() -> str:
    """Returns the table of the arguments of custom functions."""
    rows = ["| field | called with | returns |", "| --- | --- | --- |"]
    for kind in KINDS:
        if not kind.custom:
            continue
        field = f"`{kind.field}`"
        if kind.level is not None:
            field += f", `level: {kind.level}`"
        keywords = [f"{name}=" for name in kind.keywords]
        arguments = f"`{', '.join([*kind.arguments, *keywords])}`"
        if kind.named:
            arguments = f"any of {arguments}"
        for name, switch in kind.further:
            arguments += f"; then `{name}` with `{switch}: true`"
        rows.append(f"| {field} | {arguments} | {kind.returns} |")
    return "\n".join(rows) + "\n"


def _records() -> str:
    """Returns the records that custom functions get or return, with every field."""
    texts: list[str] = []
    for record in _RECORDS:
        name = f"{record.__module__}.{record.__name__}"
        texts.append(_listed(f"`{name}`: {inspect.getdoc(record)}"))
    return "\n\n".join(texts) + "\n"


def _functions(kind: Kind[Any]) -> Iterator[str]:
    """Yields an item for each function of a kind, with all its names."""
    module = import_module(f"megarl.algos.{kind.module}")
    for function in dict.fromkeys(kind.functions.values()):
        names = [name for name, target in kind.functions.items() if target == function]
        heading = ", ".join(f"`{name}`" for name in names)
        options = _options(kind.signature(names[0]))
        yield f"### {heading}\n\n{options}{_text(getattr(module, function))}\n"


def _options(signature: Signature) -> str:
    """Returns a line of the keyword arguments that a configuration gives, with their defaults."""
    options: list[str] = []
    for name, option in signature.options.items():
        text = f"`{name}`"
        if option.default is not REQUIRED:
            text += f" = {_value(option.default)}"
        options.append(text)
    return f"Options: {', '.join(options)}.\n\n" if options else ""


def _value(default: object) -> str:
    """Returns a default as YAML."""
    if isinstance(default, float):
        return f"{default:g}"
    if default is None:
        return "null"
    return str(default).lower()


def _text(function: Callable[..., Any]) -> str:
    """Returns a docstring without its sections; the source last, in a paragraph of its own."""
    docstring = inspect.getdoc(function) or ""
    text, *_ = re.split(r"^(?:Args|Returns|Raises):", docstring, maxsplit=1, flags=re.MULTILINE)
    found = re.search(r"\s*Source:\s+(.*?)(?=\n\n|\Z)", text, flags=re.DOTALL)
    if found is None:
        return _in_markdown(text)
    return _in_markdown(f"{text[: found.start()]}\n{text[found.end() :]}\n\nSource: {found[1]}")


def _listed(text: str) -> str:
    """Returns a whole docstring, with its arguments as a list."""
    text = re.sub(r"^Args:\n", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^Returns:\n +", "\nThey return ", text, flags=re.MULTILINE)
    text = re.sub(r"^    (\w+(?:, \w+)*): ", r"- `\1`: ", text, flags=re.MULTILINE)
    return _in_markdown(re.sub(r"^ {8}", "  ", text, flags=re.MULTILINE))


def _in_markdown(text: str) -> str:
    """Returns paragraphs of full lines, with single backticks; lists and indented formulas stay as they are."""
    wrap = textwrap.TextWrapper(width=120, break_long_words=False, break_on_hyphens=False)
    filled: list[str] = []
    for block in re.split(r"\n\s*\n", text.replace("``", "`").strip("\n")):
        if block.startswith(("    ", "- ")):
            filled.append(block)
        elif block.strip():
            filled.append(wrap.fill(" ".join(block.split())))
    return "\n\n".join(filled)


if __name__ == "__main__":
    print(markdown(), end="")
