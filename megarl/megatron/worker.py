"""One process of a group: the roles that take turns in it, by name. A plain class, which knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megarl.algos.rewards import shape_scores
from megarl.config import PPOConfig
from megarl.data.packing import Chunks
from megarl.megatron.experience import Columns, PerSample, build_experience
from megarl.megatron.groups import GroupCache
from megarl.megatron.losses import policy_loss, value_loss
from megarl.megatron.platform import Platform, start_platform, start_world
from megarl.megatron.role import HEADS, Role
from megarl.resharding import GlooTransport, Sender, SyncSpec, SyncStats
from megarl.types import ExperienceChunk, Ragged, RankSchedule, RoleName, RolloutChunk
from megarl.weights.export import Export, export_plan
from megarl.weights.files import load_shard, read_config
from megarl.weights.specs import ModelSpec, model_spec

TRAINED: tuple[RoleName, ...] = ("actor", "critic")


class MegatronWorker:
    """A rank of a group with all its roles. Every rank of the group gets every call, in the same order.

    Results come back on a role's reporting ranks (TP 0 of the last stage, one per replica); others return None.

    Args:
        config: of the run.
        group: name of the group.
        rank: in the group.
    """

    def __init__(self, config: PPOConfig, group: str, rank: int) -> None:
        self._config, self._group, self._rank = config, group, rank
        self._platform: Platform | None = None
        self._roles: dict[RoleName, Role] = {}
        self._transport: GlooTransport | None = None
        self._sender: Sender | None = None

    def start(self, init_method: str) -> None:
        """Joins the group's world.

        Args:
            init_method: of torch.distributed, ``tcp://host:port`` where rank 0 listens.
        """
        self._platform = start_platform(self._config.cluster.device)
        world_size = len(self._config.device_list(self._group))
        start_world(self._platform, rank=self._rank, world_size=world_size, init_method=init_method)

    def load(self, model_dir: str) -> None:
        """Builds the group's roles and reads their weights: each rank its own shards and no more.

        Args:
            model_dir: HF directory of the model.
        """
        cache = GroupCache()
        for name in sorted(self._config.groups[self._group].roles):
            self._roles[name] = self._load_role(name, model_dir, cache)

    def _load_role(self, name: RoleName, model_dir: str, cache: GroupCache) -> Role:
        directory = self._config.reward.path if name == "reward" and self._config.reward.path else model_dir
        spec = model_spec(read_config(directory))
        trainable = name in TRAINED
        dtype = getattr(torch, spec.dtype)
        role = Role(
            name,
            spec,
            self._config.layout(name),
            self._rank,
            cache,
            vocab_size=self._config.model.vocab_size or spec.dims.vocab,
            dtype=dtype,
            trainable=trainable,
        )
        new_head = self._new_head(name, spec)
        tensors = load_shard(role.shard_map, directory, spec.manifest(role.head, new_head=new_head is not None))
        for param in role.shard_map.params.keys() - tensors.keys():
            assert new_head is not None, f"{name}: {param} was not read"
            tensors[param] = new_head
        role.load(tensors)
        if trainable:
            role.start_training(self._config.optimizer(name), self._config.optimizer_steps)
        return role

    def _new_head(self, name: RoleName, spec: ModelSpec) -> torch.Tensor | None:
        """The [1, hidden] head of a critic, or of a reward model without a checkpoint; the same on every rank."""
        settings = {"critic": self._config.critic, "reward": self._config.reward}.get(name)
        if settings is None or (name == "reward" and self._config.reward.path is not None):
            return None
        generator = torch.Generator().manual_seed(settings.head_seed)
        return settings.head_std * torch.randn(1, spec.dims.hidden, generator=generator)

    def logprobs(
        self, role: RoleName, schedule: RankSchedule, rollouts: Chunks[RolloutChunk]
    ) -> dict[int, Ragged] | None:
        """Log-probabilities of the responses at the sampling temperature, nats, by chunk."""
        return self._roles[role].logprobs(schedule, rollouts, temperature=self._config.rollout.temperature)

    def values(
        self, role: RoleName, schedule: RankSchedule, rollouts: Chunks[RolloutChunk]
    ) -> dict[int, Ragged] | None:
        """Values of the states before each response token, by chunk."""
        return self._roles[role].values(schedule, rollouts)

    def scores(
        self, role: RoleName, schedule: RankSchedule, rollouts: Chunks[RolloutChunk]
    ) -> dict[int, np.typing.NDArray[np.float32]] | None:
        """Scores of the samples, [N] float32 by chunk."""
        return self._roles[role].scores(schedule, rollouts)

    def build_experience(
        self,
        schedule: RankSchedule,
        rollouts: Chunks[RolloutChunk],
        old: Chunks[Ragged],
        ref: Chunks[Ragged] | None,
        values: Chunks[Ragged] | None,
        scores: PerSample,
        outcomes: PerSample | None = None,
    ) -> tuple[dict[int, ExperienceChunk], dict[str, float]] | None:
        """The experience of this replica's chunks, and metrics over all samples; see ``experience``.

        Args:
            schedule: the actor's inference schedule.
            rollouts, old, ref, values: columns by chunk, fetched where they are read.
            scores, outcomes: of the schedule's chunks.
        """
        actor = self._roles["actor"]
        if not actor.reports:
            return None

        def reduce(vector: torch.Tensor) -> torch.Tensor:
            # Algorithm math is on the CPU; NCCL reduces on the device only.
            shared = vector.to(self._device)
            dist.all_reduce(shared, group=actor.model.groups.dp)
            return shared.to(vector.device)

        algo = self._config.algo
        shaped: dict[int, np.typing.NDArray[np.float32]] = {}
        for chunk in schedule.chunks:
            own, ended = (torch.from_numpy(np.array(x)) for x in (scores[chunk], rollouts[chunk].finished))
            shaped[chunk] = shape_scores(own, ended, clip=algo.score_clip, missing_end=algo.missing_end_score).numpy()
        columns = Columns(old_logprobs=old, ref_logprobs=ref, values=values, scores=shaped, outcomes=outcomes)
        return build_experience(schedule.chunks, rollouts, columns, algo, reduce, kl_coef=algo.kl.coef)

    def update(
        self, role: RoleName, schedules: Sequence[RankSchedule], experience: Chunks[ExperienceChunk]
    ) -> list[dict[str, float]] | None:
        """One optimizer step per schedule; their metrics, as ``role/name``."""
        trained, algo = self._roles[role], self._config.algo
        loss = (
            policy_loss(trained, algo, experience, temperature=self._config.rollout.temperature, kl_coef=algo.kl.coef)
            if HEADS[role] == "lm"
            else value_loss(trained, algo, experience)
        )
        steps = trained.update(schedules, experience, loss)
        if not trained.reports:
            return None
        return [{f"{role}/{name}": value for name, value in step.items()} for step in steps]

    def connect(self, sync: SyncSpec, rank: int) -> None:
        """Connects to the engines; waits for all ranks of the connection. Ends an earlier connection.

        Args:
            sync: this rank's part of the plan.
            rank: in the connection.
        """
        version = -1 if self._sender is None else self._sender.version
        if self._transport is not None:
            self._transport.close()
        self._transport = GlooTransport(sync, rank)
        parameters = {name: parameter.data for name, parameter in self._roles["actor"].model.parameters().items()}
        self._sender = Sender(sync.sender(rank), parameters, self._transport, verify=sync.verify, version=version)

    def send_weights(self, version: int) -> SyncStats:
        """Sends this rank's part of the actor's weights; returns when all ranks have committed the version."""
        assert self._sender is not None, "connect comes first"
        return self._sender.send(version)

    def export(self, role: RoleName, directory: str, model_dir: str) -> None:
        """Writes a role as an HF directory; every rank writes its own part.

        Args:
            directory: to make; must not exist.
            model_dir: HF directory whose tokenizer and generation settings are copied.
        """
        exported = self._roles[role]
        spec, layout = exported.spec, exported.layout
        tensors = spec.canonical(exported.head)
        maps = [spec.megatron_map(layout, rank, exported.head) for rank in range(layout.world_size)]
        parameters = {name: parameter.detach() for name, parameter in exported.model.parameters().items()}

        def barrier() -> None:
            dist.barrier()

        Export(Path(directory), tensors).run(
            export_plan(maps, tensors).senders.get(self._rank),
            parameters,
            config=spec.hf_config(exported.head),
            template=model_dir,
            lead=self._rank == 0,
            barrier=barrier,
        )

    def close(self) -> None:
        """Ends the connections and the world; the object is of no use afterwards."""
        self._sender = None
        if self._transport is not None:
            self._transport.close()
        self._roles.clear()
        dist.destroy_process_group()

    @property
    def _device(self) -> torch.device:
        assert self._platform is not None, "start comes first"
        return self._platform.device
