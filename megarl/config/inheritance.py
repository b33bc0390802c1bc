"""YAML files that inherit from others, and overrides from the command line; OmegaConf reads them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.problems import ConfigError, Problem, correct_path, shown
from megarl.config.schema.choices import SHORTHAND

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
"""Algorithms as stages: `stage: grpo` is short for `stage: ppo` with what makes the algorithm, from its recipe."""
_DEFINING: Final = ("advantage", "normalise", "policy_loss", "aggregation", "filter", "select")
_MAPPING = "the file must hold keys and values"
FREE = frozenset({"args", "chat_template_kwargs", "columns", "config", "limits"})
"""Keys of mappings that are no sections: ``name`` is no choice there."""
_Section = dict[str, Any]
_KEY_PATH = re.compile(r"[\w-]+(\.[\w-]+)*")


def merged(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Merges the files that a YAML file inherits, the file and the overrides into a plain dict; later ones win.

    Args:
        path: its ``defaults`` lists what it inherits: files, relative to it, and recipes by name.
        overrides: ``key.path=value``, with the value in YAML.

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
        tree = _expanded(tree)
        return _plain(OmegaConf.create(tree), resolve=True) if _refers(tree) else tree, problems
    except OmegaConfBaseException as error:
        field = str(getattr(error, "full_key", None) or "interpolation")
        problems.append(Problem(field, "${...}", _first_line(error), "correct the ${...} reference"))
        raise ConfigError(problems, str(path)) from error


def expanded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plain configuration with its short stage, if it has one, written out."""
    return _expanded(dict(raw))


def _expanded(tree: _Section) -> _Section:
    """Returns the tree on top of the settings of its short stage, if it has one."""
    if tree.get("stage") not in SHORT_STAGES:
        return tree
    return _merge({"algo": short_stage(tree["stage"])}, {**tree, "stage": "ppo"})


def _overridden(tree: _Section, override: str, problems: list[Problem]) -> _Section:
    """Returns the tree with an override; adds a problem if that cannot be read."""
    key, equals, value = override.partition("=")
    if not equals or not _KEY_PATH.fullmatch(key):
        fix = "write it as key.path=value, for example run.steps=3"
        problems.append(Problem("override", override, "has the form key.path=value", fix))
        return tree
    try:
        return _merge(tree, _plain(OmegaConf.from_dotlist([override])))
    except (OmegaConfBaseException, TypeError, ValueError, yaml.YAMLError) as error:
        rule = f"a value in YAML that fits its place ({_first_line(error)})"
        problems.append(Problem(key, shown(value), rule, "correct the value"))
        return tree


def _read(path: Path, inheritors: tuple[Path, ...], problems: list[Problem]) -> _Section:
    """Returns a file merged onto those that it inherits; adds what is wrong to the problems."""
    here = path.resolve()

    def wrong(rule: str, fix: str) -> _Section:
        field = f"{INHERIT_KEY} of {inheritors[-1]}" if inheritors else "config file"
        value = path.stem if path.parent == RECIPES else str(path)
        problems.append(Problem(field, value, rule, fix))
        return {}

    if here in inheritors:
        circle = " -> ".join(p.name for p in (*inheritors[inheritors.index(here) :], here))
        return wrong(f"a file must not inherit itself ({circle})", f"remove one of these {INHERIT_KEY} entries")
    try:
        loaded = OmegaConf.load(here)
    except OSError as error:
        if error.strerror is None:  # from OmegaConf, for a file with a single value
            return wrong(_MAPPING, "write key: value lines")
        if path.parent == RECIPES:
            return wrong("a file, or the name of a recipe", recipe_fix(path.stem))
        return wrong(f"the file must be readable ({error.strerror})", _other_file(path, inheritors))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        tabs = path.is_file() and any(line.startswith("\t") for line in path.read_text(errors="replace").splitlines())
        fix = "indent lines with spaces, not with tabs" if tabs else "correct the file"
        return wrong(f"the file must be YAML: {' '.join(str(error).split())}", fix)
    if not isinstance(loaded, DictConfig):
        return wrong(_MAPPING, "write key: value lines")
    own = _plain(loaded)
    inherited = own.pop(INHERIT_KEY, None)
    if inherited is not None and not isinstance(inherited, list):
        return wrong(f"{INHERIT_KEY} must be a list of file names", f"write {INHERIT_KEY}: [{shown(inherited)}]")
    tree: _Section = {}
    try:
        for name in cast(list[object], inherited or []):
            tree = _merge(tree, _read(_inherited(path, str(name)), (*inheritors, here), problems))
        return _merge(tree, own)
    except TypeError as error:
        return wrong(f"a key must be a list, or hold keys, in all files alike ({error})", "correct the file")


def _inherited(path: Path, name: str) -> Path:
    """Returns the file of a name in a file's ``defaults``."""
    is_recipe = "/" not in name and not name.endswith((".yaml", ".yml"))
    return RECIPES / f"{name}.yaml" if is_recipe else path.parent / name


def recipes() -> list[str]:
    """Returns the names of all recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def recipe_fix(name: str) -> str:
    """Returns the fix for a recipe that does not exist."""
    near = difflib.get_close_matches(name, recipes(), n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(recipes())}; a file ends with .yaml"


def _other_file(path: Path, inheritors: tuple[Path, ...]) -> str:
    """Returns the fix for a file that does not exist: the nearest name, or the files of its directory."""
    key, equals, _ = str(path).partition("=")
    misplaced = not inheritors and path.suffix not in (".yaml", ".yml")
    if misplaced and equals and _KEY_PATH.fullmatch(key):
        return "name the YAML file of the run first, and key.path=value after it"
    files = [file for file in sorted(path.parent.glob("*.y*ml")) if not file.name.startswith(".")]
    there = {file.name: file for file in files if file.resolve() not in inheritors}
    near = difflib.get_close_matches(path.name, there, n=1) or [name for name in there if Path(name).stem == path.name]
    if near:
        return f"did you mean {there[near[0]]}?"
    listed = ", ".join([*list(there)[:10], *["..."] * (len(there) > 10)])
    fix = f"correct the path; {path.absolute().parent} has {listed}" if there else correct_path(str(path))
    return f"{fix}; a setting is written key.path=value" if misplaced and path.parent == Path() else fix


def _plain(tree: DictConfig, *, resolve: bool = False) -> _Section:
    return cast(_Section, OmegaConf.to_container(tree, resolve=resolve))


def _refers(value: object) -> bool:
    """Whether a value has references, such as `${run.seed}`."""
    if isinstance(value, dict):
        return any(map(_refers, cast(dict[object, object], value).values()))
    if isinstance(value, list):
        return any(map(_refers, cast(list[object], value)))
    return isinstance(value, str) and "${" in value


def _merge(below: _Section, above: _Section) -> _Section:
    """Merges a tree onto another; a choice with another name does not keep the former one's options.

    Raises:
        TypeError: a list meets a mapping.
    """
    return _merge_section(below, above, lambda: OmegaConf.create(below), choices=True)


def _merge_section(below: _Section, above: _Section, section: Callable[[], Any], *, choices: bool) -> _Section:
    """Merges a section.

    Args:
        section: returns the one below with its references.
        choices: mappings with a name are choices.
    """
    found = dict(below)
    keys = {str(key): key for key in below}
    for name, over in above.items():
        key = keys.get(str(name), name)  # 5 in a file is "5" in an override
        under = below.get(key)
        is_choice = choices and name not in FREE
        if isinstance(under, str) and "${" in under:
            under = _referred(section(), key)
            is_choice = False
        found[key] = over
        if isinstance(over, dict):
            new = cast(_Section, over)
            if isinstance(under, dict):
                own = cast(_Section, under)
                if not (is_choice and _renamed(own, new)):
                    found[key] = _merge_section(own, new, lambda key=key: section()[key], choices=is_choice)
            elif isinstance(under, str) and is_choice and "name" not in new:
                found[key] = {SHORTHAND: under, **new}
        if isinstance(under, list if isinstance(over, dict) else dict) and isinstance(over, dict | list):
            raise TypeError(f"{name} is a list in one of them, and has keys in another")
    return found


def _renamed(under: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    """Whether a choice gets another name."""
    name = over.get("name", over.get(SHORTHAND))
    return name is not None and under.get("name", under.get(SHORTHAND)) not in (None, name)


def _referred(section: DictConfig, key: str) -> object:
    """Returns the section or list that a key refers to; None where it refers to anything else."""
    try:
        value = section[key]
    except OmegaConfBaseException:
        return None
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def short_stage(name: str) -> dict[str, Any]:
    """Returns the section `algo` that a short stage stands for, below the configuration's own settings."""
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))["algo"]
    return {key: recipe[key] for key in _DEFINING if key in recipe}
