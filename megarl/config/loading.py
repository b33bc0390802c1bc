"""Loads, checks and saves configurations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megarl.algos.registry import DIRECT_LOSSES
from megarl.config.default_devices import asleep_where_shared, on_one_device
from megarl.config.inheritance import SHORT_STAGES, expanded, merged
from megarl.config.problems import ConfigError, Problem, shown, without_pending, without_secrets
from megarl.config.rules import broken_rules
from megarl.config.schema import STAGES, RunConfig, raw_stage_class
from megarl.config.schema.base import parse_devices
from megarl.config.schema_problems import schema_problems
from megarl.files import write_durably


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    further: Callable[[RunConfig], object] = lambda _: None,
    *,
    pending_paths: Collection[Path] = (),
) -> RunConfig:
    """Reads, merges and checks a configuration.

    Args:
        path: YAML file, see `inheritance.merged`; without devices, the run gets one
            of this machine.
        overrides: settings as ``key.path=value``, as on the command line.
        further: check of models, data and functions that raises ConfigError; called with valid
            fields that break
            rules, so that one report has all problems.
        pending_paths: directories that another run writes first; paths below them may be missing.

    Raises:
        ConfigError: with every problem.
    """
    raw, unread = merged(Path(path), overrides)
    raw = on_one_device(raw)
    config, problems = _checked(raw)
    if config is not None:
        config = asleep_where_shared(config)
    problems = without_pending([*unread, *problems], raw, pending_paths)
    unchecked = ""
    if config is None:
        unchecked = "Models, rows of data and functions"
    elif problems:
        try:
            further(config)
        except ConfigError as error:
            more = without_pending(error.problems, raw, pending_paths)
            problems += [found for found in more if not any(_same(found, known) for known in problems)]
            unchecked = error.unchecked
    if config is None or problems:
        raise ConfigError(problems, str(path), unchecked)
    return config


def build(raw: Mapping[str, Any]) -> RunConfig:
    """Checks a configuration that is a plain dict; raises ConfigError with every problem."""
    config, problems = _checked(expanded(raw))
    if config is None or problems:
        raise ConfigError(problems)
    return config


def on_first_nodes[C: RunConfig](config: C, nodes: int) -> C:
    """Returns a configuration on its first nodes; raises ConfigError where that breaks a rule."""
    fields = config.model_dump(mode="json", by_alias=True)
    per_node = config.cluster.devices_per_node
    fields["cluster"] |= {"nodes": nodes, "min_nodes": None}
    for section in (*fields["groups"].values(), fields.get("rollout"), fields.get("reward", {}).get("judge_model")):
        if section is not None:
            left = (device for device in parse_devices(section["devices"]) if device < nodes * per_node)
            section["devices"] = ",".join(map(str, left))
    fewer = build(fields)
    assert isinstance(fewer, type(config))
    return fewer


def save(config: RunConfig, path: str | Path, *, secrets: bool = True) -> None:
    """Writes the resolved configuration atomically and durably, for its owner alone if it has secrets.

    Args:
        secrets: whether to write them, see `plain`.
    """
    text = as_yaml(config)
    hidden = yaml.safe_dump(plain(config), sort_keys=False)
    write_durably(Path(path), text if secrets else hidden, mode=0o600 if secrets and text != hidden else 0o666)


def as_yaml(config: RunConfig) -> str:
    """Returns the resolved configuration as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False)


def plain(config: RunConfig) -> dict[str, Any]:
    """Returns the resolved configuration for the run's directory and trackers.

    Functions' arguments whose names are those of secrets, such as `api_key` or
    `judgeTokens`, are masked.
    """
    return without_secrets(config.model_dump(mode="json", by_alias=True))


def _checked(raw: Mapping[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """Returns the configuration, if every known field is valid, and all problems.

    Rules between fields are checked if the sections that they read are valid.
    """
    schema = raw_stage_class(raw)
    if schema is None:
        short = f"or {', '.join(SHORT_STAGES)}, short for ppo with their settings"
        rule = f"one of {', '.join(STAGES)}"
        fix = f"add the stage of the run, such as stage: ppo, {short}"
        if raw.get("stage") in list(DIRECT_LOSSES.functions):
            fix = f"write stage: dpo, with preference: {{loss: {raw['stage']}}}"
        value = shown(raw["stage"]) if "stage" in raw else "(missing)"
        return None, [Problem("stage", value, rule, fix)]
    found: list[Problem] = []
    try:
        config = schema.model_validate(raw)
    except ValidationError as error:
        found = schema_problems(error, schema)
        sections = _valid_sections(schema, raw)
        config = None
        if len(sections) == len(schema.model_fields):
            config = schema.model_validate(raw, extra="ignore")
    else:
        sections = {name: getattr(config, name) for name in schema.model_fields}
    return config, [*found, *broken_rules(raw["stage"], sections)]


def _same(one: Problem, other: Problem) -> bool:
    """Whether two problems have the same field, or one a part of the other's."""
    return f"{one.field}.".startswith(f"{other.field}.") or f"{other.field}.".startswith(f"{one.field}.")


def _valid_sections(schema: type[RunConfig], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections that are valid by themselves, without unknown keys, defaults included."""
    valid: dict[str, Any] = {}
    for name, info in schema.model_fields.items():
        if name not in raw and not info.is_required():
            valid[name] = info.get_default()
            continue
        try:
            adapter = TypeAdapter[Any](info.rebuild_annotation())
            valid[name] = adapter.validate_python(raw.get(name), extra="ignore")
        except ValidationError:
            continue
    return valid
