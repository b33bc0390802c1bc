"""The built-in environments, and those of users by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from megarl import plugins
from megarl.config.schema import EnvironmentSettings
from megarl.environments.environment import Environment

ENVIRONMENTS: Final[Mapping[str, type[Environment]]] = {}
"""The built-in environments by name."""


def load_environment(config: EnvironmentSettings) -> Callable[[], Environment]:
    """Returns what makes the environment of a conversation; raises ValueError with the broken rule."""
    name = config.name
    cls = ENVIRONMENTS[name] if name in ENVIRONMENTS else plugins.resolve_class(name, Environment)
    plugins.check_options(cls, config.args, name=name, positional=0)
    return lambda: cls(**config.args)
