"""One role on one rank: its model, optimizer and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algos.optimization import ema
from megarl.algos.reward_shaping import head_std
from megarl.config.schema import LayerChoice, LoRA, Optimizer
from megarl.data.packing import Chunks, TokenChunk, scatter, scatter_scalars
from megarl.megatron.heads import response_logprobs, response_values, row_scores, token_scores
from megarl.megatron.lora_layers import AdapterSwitch, add_adapters, initial_adapters
from megarl.megatron.loss_metrics import LossMetrics, reduce_metrics
from megarl.megatron.model import build_model
from megarl.megatron.offload import HostCopy, release, share
from megarl.megatron.optimizer import ShardedOptimizer, WeightEMA, build_optimizer, learning_rate, shards
from megarl.megatron.parallel import GroupCache, build_groups
from megarl.megatron.pipeline import LastStage, MicroBatch, Work, micro_batches, run_forward, run_schedule
from megarl.megatron.routing import take_counts
from megarl.megatron.worker_requests import UpdateRequest
from megarl.models import ModelSpec, model_spec
from megarl.models.lora import SCORE_WEIGHT, Adapters, adapter_map, adapter_tensors, with_head
from megarl.role_specs import Recompute, RoleSpec, adapters_of
from megarl.types import HEADS, FloatArray, HeadName, Layout, PackRow, Ragged, RankSchedule, RoleName
from megarl.weights.hf_files import load_shard, read_config
from megarl.weights.peft_files import ADAPTER_FILE, PEFT_PREFIX, peft_manifest
from megarl.weights.shard_map import ShardMap, TensorInfo

Loss = Callable[[MicroBatch, Tensor], tuple[Tensor, LossMetrics]]
"""Maps a micro-batch and its hidden states to a weighted sum over its tokens, a scalar, and metrics."""

MakeLoss = Callable[[RankSchedule], Loss]

Head = Callable[[MicroBatch, Tensor], Tensor]


class ModelEngine:
    """A model for inference, or with ``start_training`` for training.

    Every method is collective over the role's ranks. Schedules are those of this rank's replica.
    The ranks that report (``Layout.reports``) return results, the others None. Token ids from
    ``vocab_size`` on have no probability. The dtype is the model's, if none is given.
    """

    def __init__(
        self,
        name: RoleName,
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        cache: GroupCache,
        *,
        vocab_size: int | None = None,
        dtype: torch.dtype | None = None,
        trainable: bool = False,
        recompute: Recompute = "none",
        layers: LayerChoice = "auto",
        fused: bool = False,
        frozen: bool = False,
        replays_routes: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        self.name = name
        self.spec = spec
        self.layout = layout
        self.head: HeadName = HEADS[name]
        self.coords = layout.coords(rank)
        self.reports = layout.reports(rank)
        self.shard_map: ShardMap = spec.megatron_map(layout, rank, self.head)
        self.model = build_model(
            spec,
            layout,
            build_groups(layout, rank, cache),
            head=self.head,
            vocab_size=vocab_size,
            dtype=dtype or getattr(torch, spec.dtype),
            trainable=trainable,
            recompute=recompute,
            layers=layers,
            fused=fused,
            replays_routes=replays_routes,
        )
        self.rank = rank
        self.adapters = adapters
        self.adapter_switch = AdapterSwitch()
        if adapters is not None:
            self.adapter_switch = add_adapters(self.model, spec, adapters, layout, rank)
        self.optimizer: ShardedOptimizer | None = None
        self.ema: WeightEMA | None = None
        self.steps_taken = 0
        """Optimizer steps including skipped ones: the position in the learning rate's schedule."""
        self.adam_steps = 0
        """Optimizer steps without skipped ones."""
        self._has_base_of_actor = False
        self._offloaded: dict[str, HostCopy] = {}  # by part: "optimizer", "trained" and "frozen"
        self._is_frozen = frozen
        self._frozen_copy: HostCopy | None = None

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Sets the local parameters but those of the actor, by the names of the shard map."""
        assert self.optimizer is None, "the optimizer would keep the old weights"
        parameters: dict[str, Any] = {}
        for name, parameter in self.model.parameters().items():
            if parameter.requires_grad or not self._has_base_of_actor:
                parameters[name] = parameter
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        unmatched = dict(found.items() ^ expected.items())
        assert not unmatched, f"{self.name}: the shard map has other parameters than the model: {unmatched}"
        for name, parameter in parameters.items():
            parameter.data.copy_(tensors[name])

    def share_base(self, actor: ModelEngine) -> None:
        """Takes the actor's weights, which are never trained, for those below the adapters; both have one layout."""
        assert self.layout == actor.layout, "the ranks have other parts of the weights"
        theirs = actor.model.parameters()
        for name, parameter in self.model.parameters().items():
            if not parameter.requires_grad:
                parameter.data = theirs[name].data
        self._has_base_of_actor = True

    def load_adapters(self, tensors: dict[str, Tensor]) -> None:
        """Sets every adapter, by the names of ``adapter_map``."""
        for name, parameter in self.model.adapters().items():
            parameter.data.copy_(tensors[name])

    @contextmanager
    def adapters_as(self, *, on: bool) -> Iterator[None]:
        """Switches the adapters on or off in the block; without any, both are the same."""
        before = self.adapter_switch.on
        self.adapter_switch.on = on
        try:
            yield
        finally:
            self.adapter_switch.on = before

    @property
    def saved_tensors(self) -> dict[str, TensorInfo]:
        """The canonical tensors of a checkpoint: those of adapters, and a trained head, where there are some."""
        tensors = self.spec.canonical(self.head)
        if self.adapters is None:
            return tensors
        return with_head(adapter_tensors(self.spec, self.adapters), tensors)

    def saved_map(self, rank: int) -> ShardMap:
        """Returns the map of a rank's parameters with ``saved_tensors``."""
        if self.adapters is not None and self.head == "lm":
            return adapter_map(self.spec, self.adapters, self.layout, rank)
        whole = self.shard_map
        if rank != self.rank:
            whole = self.spec.megatron_map(self.layout, rank, self.head)
        if self.adapters is None:
            return whole
        trained = adapter_map(self.spec, self.adapters, self.layout, rank)
        return trained.joined(whole.of_tensor(SCORE_WEIGHT))

    def start_training(
        self, settings: Optimizer, total_steps: int, *, together: int = 1, decay: float | None = None
    ) -> None:
        """Makes the optimizer, see ``learning_rate``, and with ``decay`` the average of the weights."""
        self._learning_rate = partial(learning_rate, settings, total=total_steps, together=together)
        self.optimizer = build_optimizer(self.model, settings)
        if decay is not None:
            self.ema = WeightEMA(self.model, self.optimizer, decay)

    @torch.no_grad()
    def soft_update(self, other: ModelEngine, weight: float) -> None:
        """Sets the weights W to weight * other + (1 - weight) * W, in float32; both have one layout."""
        assert self.layout == other.layout, "the ranks have other parts of the weights"
        theirs = other.model.parameters()
        for name, parameter in self.model.parameters().items():
            parameter.copy_(ema(parameter.float(), theirs[name], decay=1 - weight))

    @torch.no_grad()
    def scale_head(self, gain: float) -> None:
        assert self.optimizer is not None, f"{self.name} is not in training"
        self.require_state()
        for shard in shards(self.model, self.optimizer):
            if shard.name.endswith("output_layer.weight"):
                shard.main.mul_(gain)
        self.optimizer.publish()

    def offload(self) -> int:
        """Moves parameters, average and optimizer state to host memory; returns the device's bytes freed.

        Frozen weights are copied once, for all ranks of a node that have the same ones; this first
        call is collective.
        """
        freed = 0
        for part in ("optimizer", "trained", "frozen"):
            if part in self._offloaded:
                continue
            tensors = self._part(part)
            if part == "frozen" and tensors:
                self._offloaded[part] = self._released(tensors)
            else:
                self._offloaded[part] = release(tensors)
            freed += self._offloaded[part].nbytes
        return freed

    def onload(self, *, weights_only: bool = False) -> None:
        """Undoes ``offload``, bit for bit; with ``weights_only`` average and optimizer state stay where they are."""
        parts = ["trained", "frozen"]
        if not weights_only:
            parts.append("optimizer")
        for part in parts:
            if part in self._offloaded:
                self._offloaded.pop(part).restore()

    def _released(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Releases the frozen weights, whose copy stays in host memory."""
        replicas = self.model.groups.expt_dp
        if self._frozen_copy is None and replicas.size() > 1:
            self._frozen_copy = share(tensors, replicas)
        if self._frozen_copy is None:
            self._frozen_copy = release(tensors)
        else:
            self._frozen_copy.release()
        return self._frozen_copy

    def require_state(self) -> None:
        """Raises RuntimeError if average and optimizer state are offloaded."""
        if "optimizer" in self._offloaded:
            raise RuntimeError("the role is offloaded: its optimizer state has no memory; onload it first")

    def _part(self, part: str) -> list[Tensor]:
        """Returns the parameters that change, those that never do, or the rest.

        In float32 the optimizer steps views of the parameters.
        """
        frozen: list[Tensor] = []
        trained: list[Tensor] = []
        for chunk in self.model.chunks:
            for parameter in chunk.parameters():
                if parameter.requires_grad or (self.adapters is None and not self._is_frozen):
                    trained.append(parameter)
                elif not self._has_base_of_actor:
                    frozen.append(parameter)
        if part == "frozen":
            return frozen
        if part == "trained":
            return trained
        state: list[Tensor] = []
        if self.optimizer is not None:
            state += self.optimizer.state()
        if self.ema is not None:
            state += self.ema.values.values()
        shared = {tensor.untyped_storage().data_ptr() for tensor in trained}
        return [tensor for tensor in state if tensor.untyped_storage().data_ptr() not in shared]

    def logprobs(self, schedule: RankSchedule, chunks: Chunks[TokenChunk], temperature: float) -> FloatArray | None:
        """Returns the log-probability of each response token, nats, in the order of the schedule."""

        def head(batch: MicroBatch, hidden: Tensor) -> Tensor:
            return response_logprobs(self.model, batch, hidden, temperature)[0]

        return self._infer(schedule, chunks, head)

    def values(self, schedule: RankSchedule, chunks: Chunks[TokenChunk]) -> dict[int, Ragged] | None:
        """Returns the critic's value of the state before each response token, by chunk."""
        return self._per_token(schedule, chunks, partial(response_values, self.model))

    def scores(self, schedule: RankSchedule, chunks: Chunks[TokenChunk]) -> dict[int, FloatArray] | None:
        """Returns the reward model's score of each sample, [N] float32 by chunk."""
        flat = self._infer(schedule, chunks, partial(row_scores, self.model))
        return None if flat is None else scatter_scalars(rows_of(schedule), flat)

    def token_scores(self, schedule: RankSchedule, chunks: Chunks[TokenChunk]) -> dict[int, Ragged] | None:
        """Returns the reward model's scores before and after each response token, by chunk.

        A row has all scores before a token, then all after one: given tokens change the score too.
        """

        def head(batch: MicroBatch, hidden: Tensor) -> Tensor:
            before = response_values(self.model, batch, hidden)
            return torch.stack([before, token_scores(self.model, batch, hidden)], -1)

        pairs = self._per_token(schedule, chunks, head)
        if pairs is None:
            return None
        scores: dict[int, Ragged] = {}
        for chunk, column in pairs.items():
            scores[chunk] = Ragged.from_rows([pair.T.ravel() for pair in column], np.float32)
        return scores

    def _per_token(self, schedule: RankSchedule, chunks: Chunks[TokenChunk], head: Head) -> dict[int, Ragged] | None:
        flat = self._infer(schedule, chunks, head)
        return None if flat is None else scatter(rows_of(schedule), flat)

    def _infer(self, schedule: RankSchedule, chunks: Chunks[TokenChunk], head: Head) -> FloatArray | None:
        results = self._forward(schedule, chunks, head)
        return torch.cat(results).cpu().numpy() if self.reports else None

    def _forward(self, schedule: RankSchedule, chunks: Chunks[TokenChunk], last_stage: LastStage) -> list[Any]:
        batches = micro_batches(self.model, schedule, chunks)
        return run_forward(self.model, batches, schedule.pack_tokens, last_stage)

    def update(
        self,
        schedules: Sequence[RankSchedule],
        chunks: Chunks[TokenChunk],
        make_loss: MakeLoss,
        texts: tuple[UpdateRequest[RankSchedule], MakeLoss] | None = None,
    ) -> list[dict[str, float]]:
        """Takes one optimizer step per schedule; one without a finite loss and gradient changes nothing.

        Args:
            texts: texts of the same steps, and the maker of their losses, which are
                added to the others.

        Returns:
            Per step ``loss``, the losses' metrics, ``grad_norm`` (before clipping), ``lr`` and
            ``skipped`` (1 where the step changed nothing), all global. Ranks before the last stage
            lack the loss and its metrics.
        """
        model = self.model
        optimizer = self.optimizer
        assert optimizer is not None, f"{self.name} is not in training"
        self.require_state()
        assert self.ema is None or not self.ema.in_use, f"{self.name} has its average for its weights"
        steps: list[dict[str, float]] = []
        with optimizer.gradients():
            for index, schedule in enumerate(schedules):
                work = self._work(schedule, chunks, make_loss)
                if texts is not None:
                    batch, make_text_loss = texts
                    work += self._work(batch.schedules[index], batch.chunks, make_text_loss)
                optimizer.zero_grad()
                pack_tokens = schedule.pack_tokens
                results = run_schedule(model, optimizer.chunks, work, pack_tokens, optimizer.loss_factor)
                taken = self._optimizer_step(optimizer)
                if model.routed is not None:
                    taken |= take_counts(self._layers(), model.groups.intra_dist_opt)
                steps.append({**self._reduced(results), **taken})
        return steps

    def evaluate(self, schedule: RankSchedule, chunks: Chunks[TokenChunk], make_loss: MakeLoss) -> dict[str, float]:
        """Returns ``loss`` and the loss's metrics without a step; empty on ranks before the last stage."""
        return self._reduced(self._forward(schedule, chunks, make_loss(schedule)))

    def _work(self, schedule: RankSchedule, chunks: Chunks[TokenChunk], make_loss: MakeLoss) -> list[Work]:
        loss = make_loss(schedule)
        return [(batch, loss) for batch in micro_batches(self.model, schedule, chunks)]

    def _optimizer_step(self, optimizer: ShardedOptimizer) -> dict[str, float]:
        lr = self._learning_rate(self.steps_taken)
        grad_norm, stepped = optimizer.step(lr, self.adam_steps)
        self.steps_taken += 1
        self.adam_steps += stepped
        if stepped and self.ema is not None:
            self.ema.update()
        return {"grad_norm": grad_norm, "lr": lr, "skipped": float(not stepped)}

    def _layers(self) -> Iterator[Any]:
        for chunk in self.model.chunks:
            layers: Any = chunk.decoder.layers
            yield from layers

    def _reduced(self, results: Sequence[tuple[Tensor, LossMetrics]]) -> dict[str, float]:
        """Reduces over micro-batches and replicas."""
        metrics: list[LossMetrics] = []
        for loss, batch_metrics in results:
            sums = {**batch_metrics.sums, "loss": loss.detach()}
            metrics.append(replace(batch_metrics, sums=sums))
        return reduce_metrics(metrics, self.model.groups.dp) if metrics else {}


def load_engine(
    spec: RoleSpec, rank: int, cache: GroupCache, model_dir: str, actor: ModelEngine | None = None
) -> ModelEngine:
    """Builds a role on this rank and reads its weights; ``model_dir`` is the run's model.

    Args:
        actor: whose weights the role shares, if it does.
    """
    directory = spec.checkpoint or model_dir
    model = model_spec(read_config(directory)).for_lengths(spec.longest)
    if spec.name == "reference":
        model = model.with_rows_of(model_spec(read_config(model_dir)))
    training = spec.training
    lora = spec.lora
    engine = ModelEngine(
        spec.name,
        model,
        spec.layout,
        rank,
        cache,
        vocab_size=spec.vocab_size,
        trainable=training is not None,
        recompute=spec.recompute,
        layers=spec.layers,
        fused=spec.fused,
        frozen=spec.is_frozen,
        replays_routes=spec.replays_routes,
        adapters=None if lora is None else adapters_of(lora),
    )
    shard_map = engine.shard_map
    if training is not None and training.shares_base:
        assert actor is not None, "the actor is loaded first"
        engine.share_base(actor)
        shard_map = shard_map.of_tensor(SCORE_WEIGHT)
    new_head = spec.new_head
    manifest = model.manifest(engine.head, new_head=new_head is not None)
    tensors = load_shard(shard_map, directory, manifest)
    for parameter in shard_map.params.keys() - tensors.keys():
        assert new_head is not None, f"{spec.name}: {parameter} was not read"
        hidden = model.dims.hidden
        std = new_head.std
        if isinstance(std, str):
            std = head_std(hidden, rule=std)
        generator = torch.Generator().manual_seed(new_head.seed)
        tensors[parameter] = std * torch.randn(1, hidden, generator=generator)
    engine.load(tensors)
    if lora is not None:
        engine.load_adapters(start_of_adapters(engine, lora))
    if training is not None:
        engine.start_training(
            training.optimizer,
            training.total_steps,
            together=training.steps_together,
            decay=training.ema_decay,
        )
    return engine


def start_of_adapters(engine: ModelEngine, lora: LoRA) -> dict[str, Tensor]:
    """Returns the initial adapters of this rank, new or read."""
    adapters = engine.adapters
    assert adapters is not None
    shard_map = adapter_map(engine.spec, adapters, engine.layout, engine.rank)
    tensors = adapter_tensors(engine.spec, adapters)
    if lora.path is not None:
        return load_shard(
            shard_map.renamed(PEFT_PREFIX),
            lora.path,
            peft_manifest(tensors),
            ADAPTER_FILE,
        )
    return initial_adapters(shard_map, tensors, gaussian=lora.init == "gaussian", seed=lora.seed)


def rows_of(schedule: RankSchedule) -> list[PackRow]:
    """Returns the rows of all packs, in order."""
    return [row for rows in schedule.packs for row in rows]
