"""Runs that follow each other: a later one reads what an earlier one will have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, RunConfig, load
from megarl.config.files import merged
from megarl.config.promises import is_promised, unpromised
from megarl.config.schema import Model

_MAKE_A_MODEL = ("sft", "ppo", "raft")
"""Stages whose export is a model of the kind that they start from."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A run of a chain.

    Args:
        config: of the run.
        seen: the model with which it was checked: the run's own or, where an earlier run will make that, the one from
            which this starts.
    """

    config: RunConfig
    seen: Model


def load_link(
    path: Path,
    overrides: Sequence[str],
    earlier: Sequence[Link],
    check: Callable[[RunConfig], object],
    refused: Collection[Path] = (),
) -> Link:
    """Reads and checks a configuration, as far as this can be done before the earlier runs.

    Args:
        path: of the configuration.
        overrides: on top of it.
        earlier: runs that will have finished.
        check: looks beyond the configuration, and raises a ConfigError.
        refused: directories of earlier runs that are wrong themselves: what they would have written is no problem here.

    Raises:
        ConfigError: anything is wrong; it lists every problem.
    """
    raw, _ = merged(path, overrides)
    promised = [*(Path(link.config.run.dir) for link in earlier), *refused]
    stand_in = _stand_in(raw.get("model"), earlier)
    config = load(path, [*overrides, *stand_in], check, promised=promised)
    try:
        check(config)
    except ConfigError as error:
        problems = unpromised(error.problems, config.model_dump(by_alias=True), promised)
        if problems:
            raise ConfigError(problems, str(path), error.unchecked) from None
    if not stand_in:
        return Link(config=config, seen=config.model)
    own = config.model.model_copy(
        update={"path": raw["model"]["path"], "random": None, "tokenizer": raw["model"].get("tokenizer")}
    )
    return Link(config=config.model_copy(update={"model": own}), seen=config.model)


def _stand_in(model: Any, earlier: Sequence[Link]) -> list[str]:
    """Overrides that name the model from which an earlier run will make the one that is named; none if none will."""
    path = model.get("path") if isinstance(model, dict) else None
    for link in earlier:
        if link.config.stage in _MAKE_A_MODEL and is_promised(path, [Path(link.config.run.dir)]):
            return list(_overrides(link.seen, tokenizer=model.get("tokenizer")))
    return []


def _overrides(model: Model, *, tokenizer: object) -> Iterator[str]:
    random = None if model.random is None else model.random.model_dump(mode="json")
    yield f"model.path={json.dumps(model.path)}"
    yield f"model.random={json.dumps(random)}"
    if tokenizer is None:
        yield f"model.tokenizer={json.dumps(model.tokenizer)}"
