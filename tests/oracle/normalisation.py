"""Normalisation of the numbers of response tokens: rows of a step, and the group of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def whiten(
    rows: Rows,
    groups: Sequence[int] = (),
    *,
    ddof: int = 0,
    form: str = "var_plus_eps",
    eps: float = 1e-8,
    mean_only: bool = False,
    keep_mean: bool = False,
) -> list[list[float]]:
    """(x - mean) / deviation, over the numbers of all rows; with ``keep_mean`` the mean is added again."""
    del groups
    mean, variance = _moments([x for row in rows for x in row], ddof)
    deviation = 1.0 if mean_only else _deviation(variance, form, eps)
    return [[(x - mean) / deviation + (mean if keep_mean else 0.0) for x in row] for row in rows]


def grouped_tokens(rows: Rows, groups: Sequence[int], *, eps: float = 1e-5) -> list[list[float]]:
    """(x - mean) / (deviation + eps), over the numbers of a group's rows."""
    result: list[list[float]] = []
    for row, group in zip(rows, groups, strict=True):
        mean, variance = _moments([x for other, g in zip(rows, groups, strict=True) if g == group for x in other], 0)
        result.append([(x - mean) / (math.sqrt(variance) + eps) for x in row])
    return result


def levels(
    rows: Rows,
    groups: Sequence[int],
    *,
    mean: str | None,
    std: str | None,
    unbiased: bool = True,
    eps: float = 1e-5,
) -> list[list[float]]:
    """(x - mean of the batch, the group, or 0) / (deviation of all that in the batch, the group, or 1)."""

    def peers(level: str, of: Rows, group: int) -> list[float]:
        return [x for row, g in zip(of, groups, strict=True) if level == "batch" or g == group for x in row]

    centred: list[list[float]] = []
    for row, group in zip(rows, groups, strict=True):
        centre = 0.0 if mean is None else _moments(peers(mean, rows, group), 0)[0]
        centred.append([x - centre for x in row])
    if std is None:
        return centred
    deviations = [math.sqrt(_moments(peers(std, centred, group), int(unbiased))[1]) for group in groups]
    return [[x / (deviation + eps) for x in row] for row, deviation in zip(centred, deviations, strict=True)]


def _moments(numbers: Sequence[float], ddof: int) -> tuple[float, float]:
    mean = math.fsum(numbers) / len(numbers)
    divisor = len(numbers) - ddof if len(numbers) > 1 else 1
    return mean, math.fsum((x - mean) ** 2 for x in numbers) / divisor


def _deviation(variance: float, form: str, eps: float) -> float:
    forms = {
        "var_plus_eps": math.sqrt(variance + eps),
        "var_clamp": math.sqrt(max(variance, eps)),
        "std_plus_eps": math.sqrt(variance) + eps,
    }
    return forms[form]
