"""Jobs of the rank pool: roles that train, are saved, and are resumed in other layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config.schema import Optimizer
from megarl.data.schedule import update_schedules
from megarl.megatron.heads import response_logprobs, response_values, row_scores
from megarl.megatron.lora_layers import initial_adapters
from megarl.megatron.loss_metrics import LossMetrics
from megarl.megatron.optimizer import shards
from megarl.megatron.parallel import GroupCache
from megarl.megatron.state import plan_save, restore_role
from megarl.models.lora import adapter_tensors
from megarl.types import Layout, RoleName
from tests.megatron.compare import weights_of
from tests.megatron.samples import random_chunks
from tests.megatron.tiny import load_role

SCHEDULE = {"lr": 3e-2, "schedule": "cosine", "warmup": 0.3, "weight_decay": 0.1}
TOTAL_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a rank holds of a role.

    Args:
        weights: local parameters.
        moments: for each kind (the average of the weights, too) and parameter, the rank's run of it: where it starts in
            the flattened parameter, and it.
        adam_steps: the step counts of the optimizer's state, without repetitions.
        counters: the role's own.
        shard_map: of the parameters.
    """

    weights: dict[str, torch.Tensor]
    moments: dict[tuple[str, str], tuple[int, torch.Tensor]]
    adam_steps: set[float]
    counters: tuple[int, int]
    shard_map: Any


def snapshot(role: Any) -> Snapshot:
    """Copies a role's state, asking Megatron's optimizer rather than the code under test."""
    parameters = {**role.model.parameters(), **role.model.adapters()}
    names = {parameter: name for name, parameter in parameters.items()}
    moments: dict[tuple[str, str], tuple[int, torch.Tensor]] = {}
    adam_steps: set[float] = set()
    if role.ema is not None:
        moments |= _average(role)
    for optimizer in role.optimizer.chained.chained_optimizers:
        for parameter in optimizer.model_param_gbuf_map:
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            for kind, values in optimizer._get_main_param_and_optimizer_states(parameter).items():
                if kind == "step":
                    adam_steps.add(float(values))
                else:
                    moments[kind, names[parameter]] = start, values.detach().clone()
    return Snapshot(
        weights=weights_of(role),
        moments=moments,
        adam_steps=adam_steps,
        counters=(role.steps_taken, role.adam_steps),
        shard_map=role.saved_map(role.rank),
    )


def differing(one: Snapshot, other: Snapshot) -> dict[str, bool]:
    """Whether weights, moments and Adam's steps differ in a bit, padding included; moments that the first one has."""
    changes = {"adam_steps": one.adam_steps != other.adam_steps}
    changes["weights"] = any(not torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    if one.moments:
        pairs = [(one.moments[key], other.moments[key]) for key in one.moments]
        changes["moments"] = any(a[0] != b[0] or not torch.equal(a[1], b[1]) for a, b in pairs)
    return changes


def _average(role: Any) -> dict[tuple[str, str], tuple[int, torch.Tensor]]:
    runs = {shard.name: shard.span.start for shard in shards(role.model, role.optimizer)}
    return {("average", name): (runs[name], values.clone()) for name, values in role.ema.values.items()}


def canonical(snapshots: Sequence[Snapshot]) -> dict[str, torch.Tensor]:
    """Every element of every canonical tensor that the ranks hold; holders of the same element must agree.

    Args:
        snapshots: of one role, by rank.
    """
    whole: dict[str, torch.Tensor] = {}
    for held in snapshots:
        for shard in held.shard_map.shards:
            _put(whole, f"weight {shard.name}", shard, held.weights[shard.param])
        for (kind, param), (start, values) in held.moments.items():
            flat = torch.full((held.weights[param].numel(),), torch.nan)
            flat[start : start + len(values)] = values
            spread = flat.view(held.weights[param].shape)
            for shard in held.shard_map.shards:
                if shard.param == param:
                    _put(whole, f"{kind} {shard.name}", shard, spread)
    return whole


def _put(whole: dict[str, torch.Tensor], name: str, shard: Any, param: torch.Tensor) -> None:
    """Writes all elements that are not NaN; the tensor grows as needed, and unwritten elements are NaN."""
    region, values = shard.region, param[shard.box.slices]
    values = (values.mT if shard.transposed else values).reshape(region.shape)
    shape = (
        tuple(max(a, b) for a, b in zip(region.stop, whole[name].shape, strict=True)) if name in whole else region.stop
    )
    grown = torch.full(shape, torch.nan)
    if name in whole:
        grown[tuple(slice(0, n) for n in whole[name].shape)] = whole[name]
    there, values = grown[region.slices], values.float()
    both = ~there.isnan() & ~values.isnan()
    assert torch.equal(there[both], values[both]), f"{name}{region} differs between its holders"
    grown[region.slices] = torch.where(values.isnan(), there, values)
    whole[name] = grown


def make_roles(
    rank: int,
    models: Mapping[RoleName, Path],
    layouts: Mapping[RoleName, Layout],
    dtype: torch.dtype,
    layers: str = "auto",
    adapters: Any = None,
) -> dict[RoleName, Any]:
    """Roles in training, in one world; heads are nonzero.

    Args:
        adapters: ``Adapters``, which start with random A.
    """
    cache = GroupCache()
    roles: dict[RoleName, Any] = {}
    for name, layout in layouts.items():
        head = None if name == "actor" else torch.linspace(-1, 1, 32).view(1, 32).to(dtype)
        roles[name] = load_role(
            models[name],
            name,
            layout,
            rank,
            cache,
            trainable=True,
            head=head,
            dtype=dtype,
            layers=layers,
            adapters=adapters,
        )
        if adapters is not None:
            role = roles[name]
            named = adapter_tensors(role.spec, adapters)
            role.load_adapters(initial_adapters(role.saved_map(rank), named, gaussian=True, seed=1))
        decay = 0.8 if name == "actor" else None
        roles[name].start_training(Optimizer(**SCHEDULE), total_steps=TOTAL_STEPS, decay=decay)
    return roles


def train(role: Any, first: int, steps: int, broken: Sequence[int] = ()) -> list[dict[str, float]]:
    """Optimizer steps, each on different data; the loss of a broken one is NaN."""
    metrics: list[dict[str, float]] = []
    for step in range(first, first + steps):
        rollouts, infos = random_chunks(seed=step)
        factor = float("nan") if step in broken else 1.0

        def loss(batch: Any, hidden: torch.Tensor, factor: float = factor) -> Any:
            if role.head == "lm":
                outcome = response_logprobs(role.model, batch, hidden, temperature=1.0)[0]
            else:
                outcome = (response_values if role.head == "value" else row_scores)(role.model, batch, hidden)
            return factor * (outcome - 1).square().sum() / 100, LossMetrics(sums={"sum": outcome.detach().sum()})

        plan = update_schedules(infos, role.layout, 40, mini_batches=1, epochs=1, seed=0, step=step)
        own = [schedule.ranks[role.coords.dp] for schedule in plan]
        metrics += role.update(own, rollouts, lambda _schedule, chosen=loss: chosen)
    return metrics


def save(role: Any, directory: Path) -> Any:
    return plan_save(role, directory)()


def plan(role: Any, directory: Path) -> Any:
    """What writes a copy of the role as it is now; needs a group of its own."""
    import torch.distributed as dist

    return plan_save(role, directory, dist.new_group(backend="gloo"))


def restore(role: Any, directory: Path) -> None:
    restore_role(role, directory)
