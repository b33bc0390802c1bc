"""The configuration of a run: schema, inheritance, overrides, and checks."""

from megarl.config.loading import as_yaml, build, load, on_first_nodes, plain, save
from megarl.config.problems import ConfigError, Problem
from megarl.config.schema import (
    RoleConfig,
    RolloutTrainingConfig,
    RunConfig,
    SamplingConfig,
    TrainingConfig,
)
from megarl.config.schema.base import parse_devices

__all__ = [
    "ConfigError",
    "Problem",
    "RoleConfig",
    "RolloutTrainingConfig",
    "RunConfig",
    "SamplingConfig",
    "TrainingConfig",
    "as_yaml",
    "build",
    "load",
    "on_first_nodes",
    "parse_devices",
    "plain",
    "save",
]
