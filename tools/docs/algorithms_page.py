"""The page that lists every algorithm, generated from the functions; run as a script, it prints the page."""

from __future__ import annotations

import inspect
import re
import textwrap
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
from megarl.algos.curriculum import History
from megarl.algos.group_advantages import Samples
from megarl.algos.normalization import Groups
from megarl.algos.policy_loss import LossTerms
from megarl.algos.registry import KINDS, Kind
from megarl.algos.signatures import REQUIRED, Signature
from megarl.rewards.functions import soft_overlong

INTRODUCTION = Path(__file__).with_name("algorithms.md")
_RECORDS = (Samples, Groups, History, LossTerms)


PARTS: Final[dict[str, dict[Callable[..., Any], str]]] = {
    "Scores": {
        reward_shaping.clip_scores: "algo.scores.clip",
        reward_shaping.first_end: "algo.scores.truncate_at",
        reward_shaping.keep_finished: "algo.scores.missing_end: mask",
        soft_overlong: "reward.functions: soft_overlong",
    },
    "Rewards of tokens": {
        reward_shaping.kl_penalties: "algo.kl.coef",
        kl.KLController: "algo.kl.target",
        reward_shaping.token_rewards: "algo.scores.placement",
        reward_shaping.dense_rewards: "reward.dense",
        normalization.whiten_rewards: "algo.normalise.rewards",
        advantages.broadcast_advantages: "algo.kl.cumulative",
    },
    "Rollouts of another policy": {
        rollout_correction.proximal_logprobs: "algo.correction.old_logprobs",
        rollout_correction.rejection: "algo.correction.reject",
        rollout_correction.off_policy_sequences: "algo.correction.sequence_mask",
        rollout_correction.m2po: "algo.correction.m2po",
    },
    "Optimizer steps": {
        optimization.divided: "algo.mini_batches",
        optimization.exceeds_target: "algo.early_stop",
        optimization.ptx_shares: "ptx.mode",
        optimization.ema: "actor.ema, algo.kl.reference_sync",
        optimization.tensorflow_eps: "actor.optimizer.adam: tensorflow",
        optimization.linear_anneal: "actor.optimizer.schedule: anneal",
    },
    "Values": {value_loss.ValueMoments.update: "critic.value_norm"},
    "Scale of reward models": {
        reward_shaping.head_std: "reward.head_std",
        reward_shaping.score_scale: "normalisation",
    },
    "Evaluations": {
        metrics.pass_rate: "evaluation.pass_at",
        metrics.clustered_mean: "evaluation.samples_per_prompt",
    },
}
"""Algorithms without names, by title of the section, with the fields that turn them on."""


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
    for title, fields in PARTS.items():
        begin(title, {function.__module__ for function in fields})
        for function, field in fields.items():
            heading = f"`{field}`".replace(", ", "`, `")
            parts.append(f"### {heading}\n\n{_text(function)}\n")
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
