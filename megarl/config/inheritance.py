"""YAML files that inherit from others, and overrides from the command line; OmegaConf reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.problems import ConfigError, Problem, correct_path, did_you_mean, shown
from megarl.config.schema.choices import SHORTHAND
from megarl.config.schema.schema_walk import values_by_path

INHERIT_KEY = "defaults"
RECIPES: Final = Path(__file__).parents[1] / "recipes"
SHORT_STAGES: Final = (
    "grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "rloo",
    "remax",
    "opo",
    "reinforce_pp",
    "raft",
)
"""Algorithms as stages: `stage: grpo` is `stage: ppo` with the settings that make the algorithm."""
_DEFINING: Final = ("advantage", "normalise", "policy_loss", "aggregation", "filter", "select")
_MAPPING = "the file must hold keys and values"
FREE = frozenset({"args", "chat_template_kwargs", "columns", "config", "limits", "teachers"})
"""Keys of mappings that are no sections: ``name`` is no choice there."""
_Section = dict[str, Any]
_KEY_PATH = re.compile(r"[\w-]+(\.[\w-]+)*")


def merged(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Merges the files that a YAML file inherits, the file, and the overrides; later ones win.

    Args:
        path: YAML file; its ``defaults`` lists files, relative to it, and recipes by name.
        overrides: settings as ``key.path=value``, with the value in YAML.

    Returns:
        The dict, and a problem for each override that cannot be read.

    Raises:
        ConfigError: a file cannot be read, or inherits itself.
    """
    problems: list[Problem] = []
    tree = _read(path, (), problems)
    if problems:
        raise ConfigError(problems, str(path))
    for override in overrides:
        tree = _overridden(tree, override, problems)
    try:
        tree = expanded(tree)
        if any(isinstance(value, str) and "${" in value for _, value in values_by_path(tree)):
            tree = _plain(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        field = str(getattr(error, "full_key", None) or "interpolation")
        problems.append(Problem(field, "${...}", _first_line(error), "correct the ${...} reference"))
        raise ConfigError(problems, str(path)) from error
    return tree, problems


def expanded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plain configuration on top of the settings of its short stage, if it has one.

    Raises:
        ConfigError: a setting has another form than that of the short stage.
    """
    stage = tree.get("stage")
    if stage not in SHORT_STAGES:
        return dict(tree)
    recipe = yaml.safe_load((RECIPES / f"{stage}.yaml").read_text(encoding="utf-8"))["algo"]
    defining = {key: recipe[key] for key in _DEFINING if key in recipe}
    try:
        return _merge({"algo": defining}, {**tree, "stage": "ppo"})
    except TypeError as error:
        rule = f"must fit the settings of stage {stage} ({error})"
        raise ConfigError([Problem("algo", shown(tree["algo"]), rule, "correct the value")]) from error


def _overridden(tree: _Section, override: str, problems: list[Problem]) -> _Section:
    """Returns the tree with an override; adds a problem if that cannot be read."""
    key, equals, value = override.partition("=")
    if not equals or not _KEY_PATH.fullmatch(key):
        fix = "write it as key.path=value, for example run.steps=3"
        problems.append(Problem("override", override, "must have the form key.path=value", fix))
        return tree
    if key.partition(".")[0] == INHERIT_KEY:
        rule = "must be in a YAML file: the command line inherits nothing"
        fix = f"write {INHERIT_KEY}: [{value.strip('[]')}] into a file, and name it"
        problems.append(Problem(key, value, rule, fix))
        return tree
    try:
        return _merge(tree, _plain(OmegaConf.from_dotlist([override])))
    except (OmegaConfBaseException, TypeError, ValueError, yaml.YAMLError) as error:
        rule = f"must be a value in YAML that fits its place ({_first_line(error)})"
        problems.append(Problem(key, shown(value), rule, "correct the value"))
        return tree


def _read(path: Path, inheritors: tuple[Path, ...], problems: list[Problem]) -> _Section:
    """Returns a file merged onto those that it inherits; adds what is wrong to the problems."""
    here = path.resolve()

    def wrong(rule: str, fix: str) -> _Section:
        field = "config file"
        if inheritors:
            field = f"{INHERIT_KEY} of {inheritors[-1]}"
        value = str(path)
        if path.parent == RECIPES:
            value = path.stem
        problems.append(Problem(field, value, rule, fix))
        return {}

    if here in inheritors:
        circle = " -> ".join(p.name for p in (*inheritors[inheritors.index(here) :], here))
        rule = f"a file must not inherit itself ({circle})"
        return wrong(rule, f"remove one of these {INHERIT_KEY} entries")
    try:
        loaded = OmegaConf.load(here)
    except OSError as error:
        if error.strerror is None:  # from OmegaConf, for a file with a single value
            return wrong(_MAPPING, "write key: value lines")
        if path.parent == RECIPES:
            return wrong("a file, or the name of a recipe", recipe_fix(path.stem))
        key, equals, _ = str(path).partition("=")
        fix = correct_path(str(path))
        is_file = inheritors or path.suffix in (".yaml", ".yml")
        if equals and _KEY_PATH.fullmatch(key) and not is_file:
            fix = "name the YAML file of the run first, and key.path=value after it"
        if here.is_dir():
            files = ", ".join(file.name for file in sorted(here.glob("*.y*ml"))[:5])
            fix = f"name a YAML file in it: {files or 'it has none'}"
        return wrong(f"the file must be readable ({error.strerror})", fix)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        return wrong(f"the file must be YAML: {' '.join(str(error).split())}", "correct the file")
    if not isinstance(loaded, DictConfig):
        return wrong(_MAPPING, "write key: value lines")
    settings = _plain(loaded)
    inherited = settings.pop(INHERIT_KEY, None)
    if inherited is None:
        inherited = []
    if not isinstance(inherited, list):
        fix = f"write {INHERIT_KEY}: [{shown(inherited)}]"
        return wrong(f"{INHERIT_KEY} must be a list of file names", fix)
    tree: _Section = {}
    try:
        for name in cast(list[object], inherited):
            below = _read(_inherited(path, str(name)), (*inheritors, here), problems)
            tree = _merge(tree, below)
        return _merge(tree, settings)
    except TypeError as error:
        rule = f"a key must be a list, or hold keys, in all files alike ({error})"
        return wrong(rule, "correct the file")


def _inherited(path: Path, name: str) -> Path:
    """Returns the file of a name in a file's ``defaults``."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        return path.parent / name
    return RECIPES / f"{name}.yaml"


def recipes() -> list[str]:
    """Returns the names of all recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def recipe_fix(name: str) -> str:
    """Returns the fix for a recipe that does not exist."""
    return did_you_mean(name, recipes()) or f"choose one of {', '.join(recipes())}; a file ends with .yaml"


def _plain(tree: DictConfig, *, resolve: bool = False) -> _Section:
    return cast(_Section, OmegaConf.to_container(tree, resolve=resolve))


def _merge(below: _Section, above: _Section, *, choices: bool = True) -> _Section:
    """Merges a tree onto another; a choice with another name does not keep the former one's options.

    Args:
        choices: whether mappings with a name are choices.

    Raises:
        TypeError: a mapping meets a list or a reference.
    """
    found = dict(below)
    keys = {str(key): key for key in below}
    for name, value in above.items():
        key = keys.get(str(name), name)  # 5 in a file is "5" in an override
        is_choice = choices and name not in FREE
        found[key] = _merged_value(name, below.get(key), value, is_choice=is_choice)
    return found


def _merged_value(name: str, below: object, above: object, *, is_choice: bool) -> object:
    if isinstance(above, list) and isinstance(below, dict):
        raise TypeError(f"{name} must be keys with values, as {shown(cast(Any, below))}, not a list")
    if not isinstance(above, dict):
        return cast(object, above)
    section = cast(_Section, above)
    if isinstance(below, list):
        raise TypeError(f"{name} must be a list, as {shown(cast(Any, below))}, not keys with values")
    if isinstance(below, str) and "${" in below:
        raise TypeError(f"{name} must not have keys: it is the reference {below}")
    if isinstance(below, dict):
        former = cast(_Section, below)
        if is_choice and _renamed(former, section):
            return section
        return _merge(former, section, choices=is_choice)
    if isinstance(below, str) and is_choice and "name" not in section:
        return {SHORTHAND: below, **section}
    return section


def _renamed(below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    """Whether a choice gets another name."""
    name = above.get("name", above.get(SHORTHAND))
    return name is not None and below.get("name", below.get(SHORTHAND)) not in (None, name)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
