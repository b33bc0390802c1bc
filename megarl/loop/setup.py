"""From a configuration to the running parts of a stage: groups of trainers with their roles, and engines."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from megarl.cluster.engines import ENGINE, RolloutGroup
from megarl.cluster.scorers import RuleScorers
from megarl.cluster.session import Session
from megarl.cluster.trainers import Role, WorkerGroup
from megarl.config import ConfigError, EvalConfig, PPOConfig, Problem, RAFTConfig, RunConfig
from megarl.config.schema import Rollout
from megarl.data.tokenizer import has_tokenizer
from megarl.models import model_spec
from megarl.preflight.models import vocab_size
from megarl.types import RoleName

_CHUNKS_PER_REPLICA = 8
"""Chunks of a step for each DP rank of the role that has most of them: small enough to share the work evenly."""


@dataclass(frozen=True, kw_only=True)
class Trainers:
    """The groups of a run and the roles in them.

    Args:
        groups: of trainer processes, by name.
        roles: by name.
    """

    groups: Mapping[str, WorkerGroup]
    roles: Mapping[RoleName, Role]

    @property
    def chunks(self) -> int:
        """Into how many chunks the samples of a step are divided, at most."""
        return _CHUNKS_PER_REPLICA * max((role.layout.dp for role in self.roles.values()), default=1)

    def start(self, model_dir: str) -> None:
        """Connects the ranks of every group and loads the models; waits for all of them.

        Args:
            model_dir: Hugging Face directory of the model.

        Raises:
            WorkerError: a process failed to start.
        """
        for call in [group.start(model_dir) for group in self.groups.values()]:
            call.wait()

    def rest(self) -> None:
        """Offloads every role that may be."""
        for call in [group.rest() for group in self.groups.values()]:
            call.wait()

    def close(self) -> None:
        """Lets every process end by itself."""
        for call in [group.close() for group in self.groups.values()]:
            call.wait()


def check_gpus(config: RunConfig) -> None:
    """Whether this machine has the GPUs, where the run starts a Ray of its own.

    Raises:
        ConfigError: it has fewer.
    """
    cluster = config.cluster
    if cluster.device == "cpu" or cluster.address is not None:
        return
    found = torch.cuda.device_count()
    if found < cluster.devices_per_node:
        rule = f"at most the GPUs of this machine, {found}"
        fix = "lower it, join a cluster with cluster.address, or set cluster.device=cpu"
        value = str(cluster.devices_per_node)
        raise ConfigError([Problem(field="cluster.devices_per_node", value=value, rule=rule, fix=fix)])


def launch_trainers(config: RunConfig, session: Session) -> Trainers:
    """Launches the processes of every group, and returns at once."""
    groups = {name: WorkerGroup(session, config, name) for name in config.groups}
    roles: dict[RoleName, Role] = {
        role: Role(groups[name], role, config.layout(role))
        for name, group in config.groups.items()
        for role in group.roles
    }
    return Trainers(groups=groups, roles=roles)


def start_all(
    trainers: Trainers, engines: RolloutGroup | None, rules: RuleScorers | None, model_dir: str, *, sleep: bool
) -> None:
    """Starts every process and loads every model; waits for all of them.

    Args:
        trainers, engines, rules: that were launched; None where there are none.
        model_dir: Hugging Face directory of the model.
        sleep: engines are asleep once they have started: before the trainers, as the devices cannot hold both at once.

    Raises:
        WorkerError: a process failed to start.
    """
    starting = None if engines is None else engines.start()
    loading = None if rules is None else rules.start()
    if sleep and starting is not None:
        starting.wait()
    trainers.start(model_dir)
    for call in (starting, loading):
        if call is not None:
            call.wait()


def launch_engines(
    config: RunConfig,
    rollout: Rollout,
    session: Session,
    model_dir: str,
    *,
    weights: Literal["sync", "files"],
) -> RolloutGroup:
    """Launches the processes of the engines, and returns at once.

    Args:
        rollout: of the configuration.
        model_dir: Hugging Face directory of the model.
        weights: whether they come by sync, or from model_dir.
    """
    return RolloutGroup(
        session,
        rollout,
        model_dir,
        vocab_size=vocab_size(config, model_spec(config.model.hf_config())),
        device=config.cluster.device,
        tokenizer=(config.model.tokenizer or model_dir) if rollout.stop else None,
        weights=weights,
        target=_engine(rollout),
    )


def launch_rules(config: PPOConfig | RAFTConfig | EvalConfig, session: Session, model_dir: str) -> RuleScorers | None:
    """Launches the processes that run reward functions, if there are any to run, and returns at once."""
    evaluated = config.evaluation.functions if config.evaluation is not None else ()
    functions = [*config.reward.functions, *evaluated]
    if not functions:
        return None
    directory = config.model.tokenizer or model_dir
    tokenizer = directory if has_tokenizer(directory) else None
    warn = functools.partial(print, file=sys.stderr, flush=True)
    return RuleScorers(session, tokenizer, functions, config.reward, config.cluster.time_limits, warn)


def _engine(rollout: Rollout) -> str:
    """The class of the engines."""
    if rollout.record is not None:
        return "megarl.rollout.replay:RecordingEngine"
    if rollout.replay is not None:
        return "megarl.rollout.replay:ReplayingEngine"
    return ENGINE
