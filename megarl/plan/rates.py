"""How fast the devices of a run are: given, or measured by an earlier run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from megarl.config import ConfigError, PPOConfig, Problem, RAFTConfig, load
from megarl.files import read_lines
from megarl.plan.arguments import parse_pairs, positive
from megarl.run.paths import RunPaths

_KEYS = ("engine", "trainer", "token", "score", "sync", "length")
_LEAST_VARIATION = 0.05


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speed of engines and trainers. Tokens are those of responses.

    An engine with n responses in progress writes a token of each in `token + n / engine` seconds.

    Args:
        engine: tokens/s of an engine with many responses in progress.
        token: least seconds per token of a response.
        trainer: tokens/s of a trainer device, in the forward passes and the update of a step.
        score: seconds of scoring that the forward passes do not cover.
        sync: seconds of a transfer of the weights.
        lengths: tokens of the responses of each step.
    """

    engine: float
    token: float = 0.0
    trainer: float
    score: float = 0.0
    sync: float = 0.0
    lengths: Sequence[Sequence[float]]

    @classmethod
    def of(cls, text: str, config: PPOConfig | RAFTConfig) -> Self:
        """Reads the rates from a run's directory, or from `key=value,...`; raises ConfigError with what is wrong."""
        try:
            return cls.measured(Path(text)) if Path(text).is_dir() else cls._given(text, config)
        except ValueError as error:
            fix = "give the run.dir of a run with steps, or engine=TOKENS_PER_S,trainer=TOKENS_PER_S"
            raise ConfigError([Problem("--rates", text, str(error), fix)]) from None

    @classmethod
    def _given(cls, text: str, config: PPOConfig | RAFTConfig) -> Self:
        given = parse_pairs(text, _KEYS, "a number above 0", positive)
        if missing := [key for key in ("engine", "trainer") if key not in given]:
            raise ValueError(f"{' and '.join(missing)} missing, and no such directory")
        samples = config.data.prompts_per_step * config.data.samples_per_prompt
        return cls(lengths=[[given.pop("length", config.rollout.max_new_tokens)] * samples], **given)

    @classmethod
    def measured(cls, directory: Path) -> Self:
        """Reads the rates from the metrics of a run; its first step, which fills caches and pipelines, does not count.

        Raises:
            ValueError: it has no steps that sampled responses.
        """
        paths = RunPaths(directory)
        config, lines = load(paths.config), read_lines(paths.metrics)
        if not isinstance(config, PPOConfig | RAFTConfig):
            raise ValueError(f"a run of stage {config.stage} has no engines")
        ahead = config.rollout.max_staleness
        lines = lines[1 : len(lines) - ahead] or lines  # at the end there is nothing left to sample ahead
        if not lines:
            raise ValueError("no step in metrics.jsonl")
        steps = [_Seconds.of(line, ahead) for line in lines]
        lengths = [_lengths(line) for line in lines]
        devices = sum(len(config.device_list(group)) for group in config.groups)
        tokens = np.array([sum(of_step) for of_step in lengths])
        longest = np.array([max(of_step) for of_step in lengths])
        sampling = np.array([step.sampling for step in steps])
        token, per_token = _fit(longest, tokens / config.rollout.engines, sampling)
        return cls(
            engine=1 / per_token,
            token=token,
            trainer=float(tokens.sum()) / devices / sum(step.training for step in steps),
            score=sum(step.scoring for step in steps) / len(steps),
            sync=sum(step.syncing for step in steps) / len(steps),
            lengths=lengths,
        )


@dataclass(frozen=True, kw_only=True)
class _Seconds:
    """What a step took, each part by itself."""

    sampling: float
    scoring: float
    training: float
    syncing: float

    @classmethod
    def of(cls, line: Mapping[str, Any], ahead: int) -> Self:
        """Reads the metrics of a step; `ahead` is the staleness that the run allowed."""
        forward = sum(line.get(f"time/{part}", 0.0) for part in ("logprobs", "ref", "values"))
        scoring = max(0.0, line["time/reward"] - forward)
        experience = line.get("time/experience", line["time/reward"])  # RAFT has no forward passes
        busy = 1 - line["rollout/engine_idle"] if ahead else line["time/rollout"] / line["time/step"]
        return cls(
            sampling=busy * line["time/step"],
            scoring=scoring,
            training=line["time/update"] + max(min(forward, experience), experience - (0.0 if ahead else scoring)),
            syncing=line.get("sync/seconds", 0.0) + line.get("sync/offload_seconds", 0.0),
        )


def _lengths(line: Mapping[str, Any]) -> list[float]:
    """Returns lengths with the mean, the least and the largest one of a step."""
    count, mean = line["rollout/samples"], line["response_length/mean"]
    ends = [line["response_length/max"], line["response_length/min"]]
    return [*ends, *[(mean * count - sum(ends)) / (count - 2)] * (count - 2)] if count > 2 else [mean] * count


def _fit(longest: Any, tokens: Any, seconds: Any) -> tuple[float, float]:
    """Returns a and b, both at least 0, so that a * longest + b * tokens is near the seconds.

    a is 0 if the longest responses and the tokens of an engine hardly vary against each other.
    """
    if np.std(longest / tokens) > _LEAST_VARIATION * np.mean(longest / tokens):
        (a, b), *_ = np.linalg.lstsq(np.stack([longest, tokens], axis=1), seconds, rcond=None)
        if a > 0 and b > 0:
            return float(a), float(b)
    return 0.0, float(seconds.sum() / tokens.sum())
