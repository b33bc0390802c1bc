"""The cells of a sweep: each combination of its values is a run in a directory of its own."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megarl.config import ConfigError, Problem, RunConfig
from megarl.config.inheritance import merged
from megarl.config.problems import shown
from megarl.launch.checker import load_checked

_NAME_LENGTH = 100


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run of a sweep: its index in the job array, and its overrides."""

    index: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its directory, such as ``cell-0-lr-1e-6-seed-1``."""
        settings = [override.partition("=") for override in self.overrides]
        values = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, _, value in settings)
        return re.sub(r"[^A-Za-z0-9._+]+", "-", f"cell-{self.index}-{values}")[:_NAME_LENGTH].rstrip("-.")

    def __str__(self) -> str:
        return f"cell {self.index} ({' '.join(self.overrides)})"


def read_sweeps(sweeps: Sequence[str]) -> tuple[list[Cell], list[Problem]]:
    """Returns the cells of ``key.path=value,value`` texts, the last key varying fastest, and the problems."""
    axes: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for sweep in sweeps:
        key, _, text = sweep.partition("=")
        values = _values(text)
        refused = None
        if not key or not values:
            fix = "write it as key.path=value,value, for example run.seed=0,1,2"
            refused = "a key and values in YAML", fix
        elif key == "run.dir":
            refused = "not of run.dir", "set run.dir itself: each run gets a directory below it"
        elif key in axes:
            refused = f"every key once; {key} is given twice", "give all of its values together"
        if refused:
            problems.append(Problem(field="--sweep", value=shown(sweep), rule=refused[0], fix=refused[1]))
        axes[key] = values
    if problems:
        return [], problems
    combinations = itertools.product(*([f"{key}={value}" for value in values] for key, values in axes.items()))
    return [Cell(index=index, overrides=overrides) for index, overrides in enumerate(combinations)], []


def _values(text: str) -> list[str]:
    """Returns the YAML values as written, so that commas in brackets do not split; empty for invalid YAML."""
    listed = f"[{text}]"
    try:
        node = yaml.compose(listed, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(listed):
        return []
    return [listed[entry.start_mark.index : entry.end_mark.index].strip() for entry in node.value]


def run_directory(path: Path, overrides: Sequence[str]) -> str | None:
    """Returns run.dir of a configuration that may be invalid. Raises ConfigError if the file cannot be read."""
    run = merged(path, overrides)[0].get("run")
    named = run.get("dir") if isinstance(run, Mapping) else None
    return named if isinstance(named, str) else None


def load_cells(
    path: Path, overrides: Sequence[str], base: str, cells: Sequence[Cell], check: Callable[[RunConfig], object]
) -> tuple[list[RunConfig], list[ConfigError]]:
    """Returns the cells' configurations, with directories below `base`, and errors: common ones first, then by cell."""
    configs: list[RunConfig] = []
    wrong: dict[Cell, ConfigError] = {}
    for cell in cells:
        own = [*overrides, *cell.overrides, f"run.dir={json.dumps(str(Path(base) / cell.name))}"]
        try:
            configs.append(load_checked(path, own, check))
        except ConfigError as error:
            wrong[cell] = error
    if not wrong:
        return configs, list(_duplicates(path, cells, configs))
    problems = [error.problems for error in wrong.values()]
    common = [problem for problem in problems[0] if len(wrong) == len(cells) and all(problem in p for p in problems)]
    errors = [ConfigError(common, str(path), next(iter(wrong.values())).unchecked)] if common else []
    for cell, error in wrong.items():
        own = [problem for problem in error.problems if problem not in common]
        errors += [ConfigError(own, f"{path}, {cell}", error.unchecked)] if own else []
    return configs, errors


def _duplicates(path: Path, cells: Sequence[Cell], configs: Sequence[RunConfig]) -> Iterator[ConfigError]:
    known: dict[str, Cell] = {}
    for cell, config in zip(cells, configs, strict=True):
        other = known.setdefault(config.model_dump_json(by_alias=True, exclude={"run": {"dir"}}), cell)
        if other is not cell:
            rule = f"cells differ from each other; this is {other} again"
            problem = Problem(field="--sweep", value=str(cell), rule=rule, fix="give every value once")
            yield ConfigError([problem], str(path))
