"""The built-in environments, and those of users by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from megarl import plugins
from megarl.config.schema import EnvironmentSettings
from megarl.environments.environment import Environment
from megarl.environments.openenv import OpenEnv
from megarl.environments.text_environments import ReasoningGym, UserTurns
from megarl.environments.tool_environment import ToolEnvironment

ENVIRONMENTS: Final[Mapping[str, type[Environment]]] = {
    "openenv": OpenEnv,
    "reasoning_gym": ReasoningGym,
    "tools": ToolEnvironment,
    "user_turns": UserTurns,
}
"""The built-in environments by name."""


def load_environment(config: EnvironmentSettings) -> Callable[[], Environment]:
    """Returns what makes the environment of a conversation; raises ValueError with the broken rule."""
    name = config.name
    if name in ENVIRONMENTS:
        cls = ENVIRONMENTS[name]
    elif ":" in name:
        cls = plugins.resolve_class(name, Environment)
    else:
        known = ", ".join(ENVIRONMENTS)
        raise ValueError(f"{name} must be one of {known}, gateway, or a class as package.module:Class")
    plugins.check_options(cls, config.args, name=name, positional=0)
    return lambda: cls(**config.args)
