"""From a configuration to the running parts of a loop."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.cluster.group import Role, WorkerGroup
from megarl.cluster.resharder import Resharder
from megarl.cluster.rollouts import ENGINE, RolloutGroup
from megarl.cluster.session import Session
from megarl.config import PPOConfig
from megarl.data.streams import Stream
from megarl.loop.assets import model_directory
from megarl.loop.directory import RunDirectory
from megarl.loop.preflight import vocab_size
from megarl.types import Prompt, RoleName
from megarl.weights.specs import model_spec

_CHUNKS_PER_REPLICA = 8
"""Chunks of a step for each DP rank of the role that has most of them: small enough to share the work evenly."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a PPO loop works with.

    Args:
        prompts: of the run.
        groups: of trainer processes.
        rollout: the engines.
        roles: by name; the reference is missing where nothing reads it.
        resharder: from the actor to the engines.
        chunks: into which the samples of a step are divided.
    """

    prompts: Stream[Prompt]
    groups: tuple[WorkerGroup, ...]
    rollout: RolloutGroup
    roles: dict[RoleName, Role]
    resharder: Resharder
    chunks: int

    def close(self) -> None:
        """Lets every process end by itself."""
        calls = [group.close() for group in self.groups] + [self.rollout.close()]
        for call in calls:
            call.wait()


def assemble(config: PPOConfig, session: Session, directory: RunDirectory, prompts: Stream[Prompt]) -> Parts:
    """Starts every process and loads every model; the engines have no weights yet.

    Raises:
        WorkerError: a process failed to start.
    """
    model_dir = model_directory(config, directory.path)
    spec = model_spec(config.model.hf_config())
    rollout = RolloutGroup(
        session,
        config.rollout,
        model_dir,
        vocab_size=vocab_size(config, spec),
        device=config.cluster.device,
        tokenizer=config.model.tokenizer or model_dir if config.rollout.stop else None,
        target=_engine(config),
    )
    groups = {name: WorkerGroup(session, config, name) for name in config.groups}
    calls = [rollout.start(), *(group.start(model_dir) for group in groups.values())]
    for call in calls:
        call.wait()
    roles: dict[RoleName, Role] = {
        role: Role(group, role, config.layout(role))
        for name, group in groups.items()
        for role in config.groups[name].roles
    }
    resharder = Resharder(session, config, roles["actor"], rollout, spec)
    resharder.connect().wait()
    return Parts(
        prompts=prompts,
        groups=tuple(groups.values()),
        rollout=rollout,
        roles=roles,
        resharder=resharder,
        chunks=_CHUNKS_PER_REPLICA * max(role.layout.dp for role in roles.values()),
    )


def _engine(config: PPOConfig) -> str:
    """The class of the engines."""
    if config.rollout.record is not None:
        return "megarl.loop.replay:RecordingEngine"
    if config.rollout.replay is not None:
        return "megarl.loop.replay:ReplayingEngine"
    return ENGINE
