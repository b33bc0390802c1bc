"""One process of a group, with its roles by name. A plain class, independent of Ray.

The driver imports this file to name its methods, so megatron-core is imported only inside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.config import RolloutTrainingConfig, RunConfig, TrainingConfig
from megarl.config.schema.loss_specs import LossSpec, PolicySpec
from megarl.data.packing import scatter
from megarl.experience.build import build_experience
from megarl.experience.records import ExperienceChunk, ExperienceReport
from megarl.files import FileRecord
from megarl.garbage_collection import importing
from megarl.megatron.platform import set_cuda_options, start_platform, start_world
from megarl.megatron.worker_requests import ExperienceRequest, ForwardRequest, UpdateRequest
from megarl.remote import remote
from megarl.resharding import Connection, ConnectRequest, Sender, SyncStats, connect
from megarl.role_specs import role_specs, teacher_key, uses_fused_kernels
from megarl.stacks import tell_waits
from megarl.types import FloatArray, Ragged, RankSchedule, RoleName, TokenValues
from megarl.weights.export import export_plan, export_weights
from megarl.weights.peft_files import adapter_export

if TYPE_CHECKING:
    from megarl.megatron.model_engine import ModelEngine

PerSample = dict[int, FloatArray]
"""[N] float32 by chunk."""


class Offloader:
    """Keeps idle roles that may be offloaded in host memory; roles may be added later.

    Args:
        same: roles that have the model of another one.
        above: roles that have the weights of the actor.
    """

    def __init__(
        self,
        roles: Mapping[str, ModelEngine],
        offloadable: Collection[str],
        same: Mapping[str, str] | None = None,
        above: Collection[str] = (),
    ) -> None:
        self._roles = roles
        self._offloadable = frozenset(offloadable)
        self._same = same or {}
        self._above = frozenset(above)

    def onload(self, name: str, *others: str, weights_only: bool = False) -> ModelEngine:
        """Returns the role with its memory on the device; offloads all roles but it and ``others``.

        With ``weights_only``, what is on the host of average and optimizer state stays there: a forward
        pass, a sync or an export does not read it.
        """
        wanted = [self._same.get(present, present) for present in (name, *others)]
        self.offload_all(but=wanted)
        if not self._above.isdisjoint(wanted):
            self._roles["actor"].onload(weights_only=True)
        for present in wanted:
            self._roles[present].onload(weights_only=weights_only)
        return self._roles[wanted[0]]

    def offload_all(self, but: Collection[str] = ()) -> None:
        """Offloads every offloadable role, so that another process can use the device."""
        freed = 0
        kept = set(but)
        if not self._above.isdisjoint(kept):
            kept.add("actor")
        for name in sorted(self._offloadable & self._roles.keys()):
            if name not in kept:
                freed += self._roles[name].offload()
        if freed:
            torch.cuda.empty_cache()  # for other processes


class MegatronWorker:
    """A rank of a group with all its roles. Every rank of the group gets every call, in the same order.

    A role's reporting ranks (TP 0 of the last stage, one per replica) return results; the others
    return None.
    """

    def __init__(self, config: RunConfig, group: str, rank: int) -> None:
        self._config = config
        self._group = group
        self._rank = rank
        self._device = torch.device("cpu")  # until the start
        self._specs = role_specs(config, group)
        self._roles: dict[str, ModelEngine] = {}
        offloadable: list[str] = [name for name, spec in self._specs.items() if spec.offload]
        bases: dict[str, str] = {name: "actor" for name, spec in self._specs.items() if spec.is_base}
        above = [name for name, spec in self._specs.items() if spec.training and spec.training.shares_base]
        self._offloader = Offloader(self._roles, offloadable, bases, above)
        self._engine_shares_device = isinstance(config, RolloutTrainingConfig) and config.rollout.sleep
        self._senders: dict[int, tuple[Connection, Sender]] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writes: dict[RoleName, Future[list[FileRecord]]] = {}
        self._write_group: dist.ProcessGroup | None = None
        self._token_values: TokenValues = {}

    @remote(phase="start")
    def start(self, init_method: str) -> None:
        """Joins the group's world by torch.distributed's ``tcp://host:port``, where rank 0 listens."""
        config = self._config
        patience = config.cluster.time_limits.patience
        if config.cluster.device == "cuda":
            set_cuda_options(tensor_parallel=any(spec.layout.tp > 1 for spec in self._specs.values()))
        with importing():
            self._device = start_platform(config.cluster.device, fused=uses_fused_kernels(config))
            import megarl.megatron.model_engine  # noqa: F401  (`load` needs it)
            from megarl.megatron.parallel import collectives
        start_world(
            self._device,
            rank=self._rank,
            world_size=len(config.device_list(self._group)),
            init_method=init_method,
            timeout_seconds=patience,
        )
        tell_waits(collectives)
        if isinstance(config, TrainingConfig) and config.checkpoint.async_save:
            # For the writing thread: collectives of two threads must not meet in one group.
            limit = timedelta(seconds=patience)
            self._write_group = dist.new_group(backend="gloo", timeout=limit, group_desc="checkpoint")

    @remote(phase="start")
    def load(self, model_dir: str) -> None:
        """Builds the group's roles and reads their weights; ``model_dir`` has the run's model."""
        from megarl.megatron.model_engine import load_engine
        from megarl.megatron.parallel import GroupCache

        cache = GroupCache(self._config.cluster.time_limits.patience)
        for name, spec in sorted(self._specs.items()):  # the actor is the first one
            if spec.is_base:
                continue
            actor: ModelEngine | None = None
            if spec.training is not None and spec.training.shares_base:
                actor = self._offloader.onload("actor", weights_only=True)
            self._roles[name] = load_engine(spec, self._rank, cache, model_dir, actor)
            self._offloader.offload_all()

    @remote(phase="inference")
    def logprobs(self, role: RoleName, request: ForwardRequest[RankSchedule]) -> dict[int, Ragged] | None:
        """Returns the log-probabilities of the responses, nats, by chunk.

        Of several teachers, each reads its packs.
        """
        from megarl.megatron.model_engine import rows_of

        schedule = request.schedule
        packs = list(zip(schedule.teachers, schedule.packs, strict=True))
        parts: list[FloatArray] = []
        for teacher, its_packs in itertools.groupby(packs, key=lambda pack: pack[0]):
            part = replace(schedule, packs=tuple(pack for _, pack in its_packs))
            key = teacher_key(teacher) if teacher else role
            engine = self._offloader.onload(key, weights_only=True)
            with engine.adapters_as(on=request.adapted and not self._specs[key].is_base):
                flat = engine.logprobs(part, request.chunks, request.temperature)
            if flat is not None:
                parts.append(flat)
        return scatter(rows_of(schedule), np.concatenate(parts)) if parts else None

    @remote(phase="inference")
    def values(self, role: RoleName, request: ForwardRequest[RankSchedule]) -> dict[int, Ragged] | None:
        """Returns the values of the states before each response token, by chunk."""
        return self._offloader.onload(role, weights_only=True).values(request.schedule, request.chunks)

    @remote(phase="inference")
    def scores(self, role: RoleName, request: ForwardRequest[RankSchedule]) -> PerSample | None:
        """Returns the scores of the samples, [N] float32 by chunk."""
        return self._offloader.onload(role, weights_only=True).scores(request.schedule, request.chunks)

    @remote(phase="inference")
    def token_scores(
        self, role: RoleName, request: ForwardRequest[RankSchedule]
    ) -> tuple[dict[int, Ragged], PerSample] | None:
        """Returns the scores before and after each response token, and ``scores``, by chunk."""
        columns = self._offloader.onload(role, weights_only=True).token_scores(request.schedule, request.chunks)
        if columns is None:
            return None
        scores: PerSample = {}
        for chunk, column in columns.items():
            scores[chunk] = column.values[column.offsets[1:] - 1]
        return columns, scores

    @remote(phase="inference")
    def build_experience(
        self, role: RoleName, request: ExperienceRequest[RankSchedule]
    ) -> tuple[dict[int, ExperienceChunk], ExperienceReport] | None:
        """Returns the experience of this replica's chunks, and the report of all replicas."""
        actor = self._roles[role]
        loss = self._loss_spec(role)
        assert isinstance(loss, PolicySpec), "experience is for a policy loss"
        if not actor.reports:
            return None

        def reduce(vector: torch.Tensor, operation: Any) -> torch.Tensor:
            # The experience is built on the CPU; NCCL reduces on the device only.
            shared = vector.to(self._device)
            dist.all_reduce(shared, op=operation, group=actor.model.groups.dp)
            return shared.to(vector.device)

        return build_experience(
            request.schedule.chunks,
            request.rollouts,
            request.columns,
            loss.algo,
            loss.value_norm,
            request.context,
            partial(reduce, operation=dist.ReduceOp.SUM),
            partial(reduce, operation=dist.ReduceOp.MAX),
        )

    @remote(phase="update")
    def update(self, role: RoleName, request: UpdateRequest[RankSchedule]) -> list[dict[str, float]] | None:
        """Takes one optimizer step per schedule; returns the steps' metrics."""
        from megarl.megatron.losses import loss_maker, report
        from megarl.megatron.supervised_losses import text_loss

        spec = self._loss_spec(role)
        reference = None
        if isinstance(spec, PolicySpec) and spec.algo.kl.reads_distributions:
            engine = self._offloader.onload(role, "reference")
            reference = engine if self._specs["reference"].is_base else self._roles["reference"]
        else:
            engine = self._offloader.onload(role)
        texts = None
        if request.texts is not None:
            assert isinstance(spec, PolicySpec), "only a policy is trained on texts beside its rollouts"
            texts = request.texts, partial(text_loss, engine, mix_share=spec.mix_share)
        make_loss = loss_maker(
            spec,
            engine,
            request.chunks,
            kl_coef=request.kl_coef,
            reference=reference,
            token_values=self._token_values if self._config.tracking.tokens else None,
        )
        steps = engine.update(request.schedules, request.chunks, make_loss, texts)
        if self._engine_shares_device:
            torch.cuda.empty_cache()  # for its weights, which come before roles are offloaded
        if not engine.reports:
            return None
        return [report(spec, step) for step in steps]

    @remote(phase="update")
    def take_token_values(self, role: RoleName) -> TokenValues:
        """Pops the per-token values of the last update."""
        values = self._token_values
        self._token_values = {}
        return values if self._roles[role].reports else {}

    @remote(phase="inference")
    def evaluate(self, role: RoleName, request: ForwardRequest[RankSchedule]) -> dict[str, float] | None:
        """Returns the stage's loss and its metrics without a step, as ``eval/name``."""
        from megarl.megatron.losses import loss_maker

        engine = self._offloader.onload(role, weights_only=True)
        make_loss = loss_maker(self._loss_spec(role), engine, request.chunks)
        metrics = engine.evaluate(request.schedule, request.chunks, make_loss)
        if not engine.reports:
            return None
        return {f"eval/{name}": value for name, value in metrics.items()}

    @remote(phase="inference")
    def scale_head(self, role: RoleName, gain: float) -> None:
        """Multiplies the weights of a trained role's head."""
        self._offloader.onload(role).scale_head(gain)

    @remote(phase="start")
    def connect(self, request: ConnectRequest) -> None:
        """Connects to engines, which waits for all ranks; ends an earlier connection of the link."""
        (rank,) = request.ranks
        version = -1
        if request.link in self._senders:
            version = self._senders[request.link][1].version
        self._disconnect(request.link)
        connection = connect(request.sync, rank, self._device)
        from megarl.megatron.lora_layers import merged_weights, separate_weights

        weights_of = merged_weights if self._config.separate_adapters is None else separate_weights
        weights = weights_of(self._offloader.onload("actor", weights_only=True).model)
        self._senders[request.link] = connection, Sender(connection, weights, version=version)

    @remote(phase="sync")
    def send_weights(self, version: int, link: int = 0) -> SyncStats:
        """Sends this rank's part of the actor's weights; returns when all ranks have committed the version.

        The stage ``offload`` brings the actor to the device.
        """
        start = perf_counter()
        self._offloader.onload("actor", weights_only=True)
        offload = perf_counter() - start
        stats = self._senders[link][1].send(version)
        stats.seconds["offload"] = offload
        return stats

    @remote(phase="checkpoint")
    def save(self, role: RoleName, directory: str, *, in_background: bool = False) -> list[FileRecord] | None:
        """Writes a role's part of a checkpoint, or starts to; see ``state.plan_save``."""
        from megarl.megatron.state import plan_save

        engine = self._offloader.onload(role)
        if not in_background:
            return plan_save(engine, Path(directory))()
        assert self._write_group is not None, "checkpoint.async_save is false"
        self._writes[role] = self._writer.submit(plan_save(engine, Path(directory), self._write_group))
        return None

    @remote(phase="checkpoint")
    def saved(self, role: RoleName, *, wait: bool) -> list[FileRecord] | None:
        """Returns the files of a ``save`` in the background; None if it still writes, without ``wait``."""
        write = self._writes[role]
        return write.result() if wait or write.done() else None

    @remote(phase="checkpoint")
    def restore(self, role: RoleName, directory: str) -> None:
        """Reads a role's part of a checkpoint; see ``state.restore_role``."""
        from megarl.megatron.state import restore_role

        restore_role(self._offloader.onload(role), Path(directory))

    @remote(phase="checkpoint")
    def export(self, role: RoleName, directory: str, tokenizer: str, model_dir: str) -> None:
        """Writes a role as an HF directory, which must not exist; every rank writes a part.

        Adapters are written beside it, in PEFT's format, and the model with ``lora.merge`` alone.

        Args:
            tokenizer: directory whose tokenizer and generation settings are copied.
            model_dir: directory of the model that the role started from, whose other tensors are copied.
        """
        from megarl.megatron.lora_export import export_adapters
        from megarl.megatron.lora_layers import merged_weights
        from megarl.megatron.parallel import barrier

        engine = self._offloader.onload(role, weights_only=True)
        lora = self._specs[role].lora
        if lora is not None:
            export_adapters(
                engine,
                lora,
                adapter_export(Path(directory)),
                tokenizer,
                model_dir,
            )
            if not lora.merge:
                return
        spec = engine.spec
        layout = engine.layout
        tensors = spec.canonical(engine.head)
        maps = [spec.megatron_map(layout, rank, engine.head) for rank in range(layout.world_size)]
        export_weights(
            Path(directory),
            tensors,
            export_plan(maps, tensors).senders.get(self._rank),
            merged_weights(engine.model),
            config=spec.hf_config(engine.head),
            template=tokenizer,
            untrained=(model_dir, spec.untrained),
            lead=self._rank == 0,
            barrier=barrier,
        )

    @remote(phase="inference")
    def swap_weights(self, role: RoleName, wanted: bool) -> None:
        """Swaps in the average of a role's weights (True), or its weights again."""
        ema = self._offloader.onload(role).ema
        assert ema is not None, f"{role} has no average"
        ema.swap_weights(wanted)

    @remote(phase="inference")
    def soft_update_reference(self, role: RoleName) -> None:
        """Moves the reference towards a role by the weight of ``algo.kl.reference_sync``."""
        weight = self._specs["reference"].reference_weight
        assert weight is not None, "the reference is fixed"
        self._offloader.onload("reference", role, weights_only=True).soft_update(self._roles[role], weight)

    @remote(phase="update")
    def skip_steps(self, role: RoleName, steps: int) -> None:
        """Advances the learning rate's schedule by optimizer steps that are not taken."""
        self._roles[role].steps_taken += steps

    @remote(phase="inference")
    def offload_all(self) -> None:
        """Frees the device for engines: offloads every role that may be, and empties the allocator's cache."""
        self._offloader.offload_all()
        torch.cuda.empty_cache()  # of activations, too

    @remote(phase="start")
    def close(self) -> None:
        """Ends the connections and the world; the worker cannot be used again."""
        for link in list(self._senders):
            self._disconnect(link)
        self._writer.shutdown()
        self._roles.clear()
        dist.destroy_process_group()

    def _disconnect(self, link: int) -> None:
        if link in self._senders:
            connection, _ = self._senders.pop(link)
            connection.close()

    def _loss_spec(self, name: RoleName) -> LossSpec:
        training = self._specs[name].training
        assert training is not None, f"{name} is not in training"
        return training.loss
