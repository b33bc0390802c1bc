"""The configuration of a run: schema, inheritance, overrides, and checks that report everything at once."""

from megarl.config.devices import parse_devices
from megarl.config.loading import build, load, save
from megarl.config.problems import ConfigError, Problem
from megarl.config.schema import PPOConfig, RewardModelConfig, RoleConfig, RunConfig, SFTConfig

__all__ = [
    "ConfigError",
    "PPOConfig",
    "Problem",
    "RewardModelConfig",
    "RoleConfig",
    "RunConfig",
    "SFTConfig",
    "build",
    "load",
    "parse_devices",
    "save",
]
