"""Sweeps: every combination of the given values is a run of its own, a cell, in a directory of its own."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megarl.config import ConfigError, Problem, RunConfig, load
from megarl.config.files import merged
from megarl.config.problems import shown

_LONGEST_NAME = 100


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run of a sweep.

    Args:
        index: from 0; that of the job array.
        overrides: ``key.path=value``, which tell it from the others.
    """

    index: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its directory below that of the sweep, such as ``cell-0-lr-1e-6-seed-1``."""
        settings = [override.partition("=") for override in self.overrides]
        values = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, _, value in settings)
        return re.sub(r"[^A-Za-z0-9._+]+", "-", f"cell-{self.index}-{values}")[:_LONGEST_NAME].rstrip("-.")

    def __str__(self) -> str:
        return f"cell {self.index} ({' '.join(self.overrides)})"


def read_sweeps(sweeps: Sequence[str]) -> tuple[list[Cell], list[Problem]]:
    """The cells, the last key's values in turn first, and what is wrong.

    Args:
        sweeps: ``key.path=value,value``; values are YAML, so that lists and mappings keep their commas.
    """
    axes: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        values = _values(text)
        if not key or not equals or not values:
            fix = "write it as key.path=value,value, for example run.seed=0,1,2"
            problems.append(Problem(field="--sweep", value=shown(sweep), rule="a key and values in YAML", fix=fix))
        elif key == "run.dir":
            fix = "set run.dir itself: each run gets a directory below it"
            problems.append(Problem(field="--sweep", value=shown(sweep), rule="not of run.dir", fix=fix))
        elif key in axes:
            rule, fix = f"every key once; {key} is given twice", "give all of its values together"
            problems.append(Problem(field="--sweep", value=shown(sweep), rule=rule, fix=fix))
        else:
            axes[key] = values
    if problems:
        return [], problems
    combinations = itertools.product(*([f"{key}={value}" for value in values] for key, values in axes.items()))
    return [Cell(index=index, overrides=overrides) for index, overrides in enumerate(combinations)], []


def run_directory(path: Path, overrides: Sequence[str]) -> str | None:
    """The run.dir of a configuration that may have other mistakes; of a sweep, the cells have theirs below it.

    Raises:
        ConfigError: the file cannot be read.
    """
    run = merged(path, overrides)[0].get("run")
    named = run.get("dir") if isinstance(run, Mapping) else None
    return named if isinstance(named, str) else None


def load_cells(
    path: Path, overrides: Sequence[str], base: str, cells: Sequence[Cell], check: Callable[[RunConfig], object]
) -> tuple[list[RunConfig], list[ConfigError]]:
    """Reads and checks the configuration of every cell.

    Args:
        path: of the sweep's configuration.
        overrides: on top of it, in all cells.
        base: directory below which each cell has its own.
        cells: of the sweep.
        check: looks beyond a configuration, and raises a ConfigError.

    Returns:
        The configurations, and what is wrong: once what is wrong in all cells, then by cell.
    """
    configs: list[RunConfig] = []
    wrong: dict[Cell, ConfigError] = {}
    for cell in cells:
        own = [*overrides, *cell.overrides, f"run.dir={json.dumps(str(Path(base) / cell.name))}"]
        try:
            config = load(path, own, check)
            check(config)
            configs.append(config)
        except ConfigError as error:
            wrong[cell] = error
    if not wrong:
        return configs, list(_same(path, cells, configs))
    problems = [error.problems for error in wrong.values()]
    common = [problem for problem in problems[0] if len(wrong) == len(cells) and all(problem in p for p in problems)]
    told = [ConfigError(common, str(path), next(iter(wrong.values())).unchecked)] if common else []
    for cell, error in wrong.items():
        own = [problem for problem in error.problems if problem not in common]
        told += [ConfigError(own, f"{path}, {cell}", error.unchecked)] if own else []
    return configs, told


def _same(path: Path, cells: Sequence[Cell], configs: Sequence[RunConfig]) -> Iterator[ConfigError]:
    """Cells that would be the same run."""
    known: dict[str, Cell] = {}
    for cell, config in zip(cells, configs, strict=True):
        other = known.setdefault(config.model_dump_json(by_alias=True, exclude={"run": {"dir"}}), cell)
        if other is not cell:
            fix = "give every value once"
            rule = f"cells differ from each other; this is {other} again"
            yield ConfigError([Problem(field="--sweep", value=str(cell), rule=rule, fix=fix)], str(path))


def _values(text: str) -> list[str]:
    """The values as they are written; none where they are not YAML."""
    try:
        node = yaml.compose(f"[{text}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(text) + 2:
        return []
    return list(_sources(node, f"[{text}]"))


def _sources(sequence: yaml.SequenceNode, text: str) -> Iterator[str]:
    """The text of every entry of a sequence."""
    for entry in sequence.value:
        yield text[entry.start_mark.index : entry.end_mark.index].strip()
