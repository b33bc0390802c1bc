"""The memory that a run takes on each device in each phase, from its configuration and its models' sizes alone.

Parameters, gradients, optimizer state and caches are exact. What vLLM and CUDA take besides is an
allowance. All sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from megarl.config import RolloutTrainingConfig, RunConfig, TrainingConfig, parse_devices
from megarl.config.schema import Rollout
from megarl.models import ModelSpec, model_spec
from megarl.preflight.capacity import capacity
from megarl.preflight.nccl_memory import nccl_bytes
from megarl.preflight.role_memory import RoleMemory, role_memory
from megarl.role_specs import RoleSpec, adapters_of, role_specs
from megarl.rollout.engine_memory import PROCESS, WORKSPACE, EngineRankMemory, cache_filling, fills_device
from megarl.types import RoleName
from megarl.weights.hf_files import read_config

_MIB = 1 << 20

_EXACT = ("parameters", "gradients", "optimizer", "weights", "cache", "snapshot")


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The memory of a device in a phase.

    Args:
        optimizer: optimizer state, and the average of the weights.
        activations, logits: memory of a forward pass, and of a backward pass where there is one.
        stepping: Adam's intermediate results, when the activations are gone.
        weights, cache, engine: weights, key-value cache and the rest of a vLLM engine, see
            `EngineRankMemory`.
        process: what processes take by themselves, with cuBLAS's workspaces on a GPU.
        snapshot: copy for a checkpoint that is being written, on a CPU.
        offloaded: memory on the host, not on the device; also a snapshot.
    """

    phase: str
    role: str | None
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    stepping: int = 0
    weights: int = 0
    cache: int = 0
    engine: int = 0
    buckets: int = 0
    process: int = 0
    nccl: int = 0
    snapshot: int = 0
    offloaded: int = 0

    @property
    def exact(self) -> int:
        """Returns what is certain to be needed."""
        return sum(getattr(self, name) for name in _EXACT)

    @property
    def peak(self) -> int:
        fixed = self.exact + self.engine + self.buckets + self.process + self.nccl
        return fixed + max(self.activations + self.logits, self.stepping)


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """A device: its roles by name, and its engine.

    Args:
        cache_field: field of the configuration for the size of the engine's cache.
        bucket: largest size of a message of a sync.
        nccl: buffers of NCCL's communicators.
        sleeps: whether the engine gives weights and cache back while the trainers work.
        keeps_weights: whether the host has the weights of a sleeping engine.
        saved: roles of checkpoints that are written during the training.
        sharing: ranks of the node that share a copy of a role's frozen weights on the host, by role.
    """

    device: int
    kind: str
    roles: Mapping[str, RoleMemory] = field(default_factory=dict[str, RoleMemory])
    engine: EngineRankMemory | None = None
    cache_field: str = ""
    bucket: int = 0
    nccl: int = 0
    sleeps: bool = False
    keeps_weights: bool = False
    saved: Collection[RoleName] = ()
    sharing: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def besides_cache(self) -> int:
        """Returns the most that the device has besides the engine's cache, while it has that."""
        taken = [0]
        for found in self.phases():
            if found.phase == "generate" or not self.sleeps:
                taken.append(found.peak - found.cache)
        return max(taken)

    def phases(self) -> Iterator[PhaseMemory]:
        """Yields the phases, each with the role that takes most in it."""
        trained: list[str] = []
        for role, memory in self.roles.items():
            if memory.spec.training is not None:
                trained.append(role)
        if self.engine is not None:
            yield self._phase("generate", None)
        if self.roles:
            yield self._largest("inference", self.roles)
        if trained:
            yield self._largest("update", trained)
        if self.bucket and "actor" in self.roles:
            yield self._phase("sync", "actor")
        elif self.bucket and self.engine is not None:
            yield self._phase("sync", None)
        if trained:
            yield self._largest("checkpoint", trained)

    def _largest(self, phase: str, roles: Iterable[str]) -> PhaseMemory:
        return max((self._phase(phase, role) for role in roles), key=lambda found: found.peak)

    def _phase(self, phase: str, role: str | None) -> PhaseMemory:
        """Returns what the device has while a role works, or none.

        On a CPU, the device is the host to which roles are offloaded.
        """
        sizes = Counter[str](self._engine_memory(phase))
        sizes["process"] = PROCESS * (bool(self.roles) + (self.engine is not None))
        if self.kind == "cuda":
            sizes["nccl"] = self.nccl
            if self.roles:
                sizes["process"] += 2 * WORKSPACE  # of the threads of the forward and of the backward pass
        active: set[str | None] = {role}
        if role is not None:
            working = self.roles[role]
            if phase == "inference":
                sizes["activations"], sizes["logits"] = working.inference
            elif phase == "update":
                sizes["activations"], sizes["logits"] = working.update
                sizes["gradients"] = working.gradients
                sizes["stepping"] = working.stepping
                if working.spec.reads_distributions:
                    active.add("reference")
            elif phase == "checkpoint":
                sizes["snapshot"] = working.written
            elif phase == "sync":
                sizes["buckets"] += 2 * min(self.bucket, working.parameters)
                if working.spec.lora is not None:
                    # The sum of a box in float32, and rounded.
                    sizes["buckets"] += 3 * min(self.bucket, working.parameters)
            if working.spec.training is not None and working.spec.training.shares_base:
                active.add("actor")
        for name, memory in self.roles.items():
            offloads = self.kind != "cpu" and memory.spec.offload
            if name in active or not offloads:
                sizes["parameters"] += memory.parameters
                sizes["optimizer"] += memory.optimizer
            else:
                sizes["offloaded"] += memory.state - memory.frozen
            if offloads and memory.frozen:
                sizes["offloaded"] += memory.frozen // self.sharing[name]
            if name in self.saved:
                sizes["snapshot"] += memory.snapshot
        if self.kind != "cpu":
            sizes["offloaded"] += sizes.pop("snapshot", 0)
        return PhaseMemory(phase=phase, role=role, **sizes)

    def _engine_memory(self, phase: str) -> dict[str, int]:
        """Returns the engine's weights, cache, buckets and the rest in a phase."""
        engine = self.engine
        if engine is None:
            return {}
        sizes = {"engine": engine.kept}
        if phase in ("generate", "sync") or not self.sleeps:
            sizes["weights"] = engine.weights
        elif self.keeps_weights:
            sizes["offloaded"] = engine.weights
        if phase == "generate" or not self.sleeps:
            sizes["cache"] = engine.cache
        if phase == "generate" or (self.kind == "cuda" and not self.sleeps):
            sizes["engine"] += engine.work
        if phase == "sync":
            sizes["engine"] += engine.repacked
        # On a CPU, an engine keeps its buckets between syncs.
        if phase == "sync" or (phase == "generate" and self.kind == "cpu"):
            sizes["buckets"] = 2 * min(self.bucket, engine.weights)
        return sizes


def plan_memory(config: RunConfig) -> list[DevicePlan]:
    """Returns every device that the run uses."""
    plans = _plans(config)
    rollout = config.engine_settings
    if rollout is not None and fills_device(rollout, config.cluster.device):
        room = capacity(config)
        memory = room.device_bytes if room.known else None
        model = model_spec(config.model.hf_config())
        cache = cache_filling(model, rollout, memory, _besides_cache(plans, rollout))
        for device in parse_devices(rollout.devices):
            engine = plans[device].engine
            assert engine is not None
            plans[device] = replace(plans[device], engine=replace(engine, cache=cache))
    return [plans[device] for device in sorted(plans)]


def besides_cache(config: RunConfig) -> int:
    """Returns the most that a device has besides the rollout engine's cache, while it has that; 0 if none fills it."""
    rollout = config.engine_settings
    if rollout is None or not fills_device(rollout, config.cluster.device):
        return 0
    return _besides_cache(_plans(config), rollout)


def _besides_cache(plans: Mapping[int, DevicePlan], rollout: Rollout) -> int:
    return max(plans[device].besides_cache for device in parse_devices(rollout.devices))


def _plans(config: RunConfig) -> dict[int, DevicePlan]:
    """Returns every device, without caches that fill it."""
    kind = config.cluster.device
    plans = dict[int, DevicePlan]()
    rollout = config.engine_settings
    saved: tuple[RoleName, ...] = ()
    if isinstance(config, TrainingConfig) and _saves_meanwhile(config):
        saved = config.saved
    bucket = 0
    if isinstance(config, RolloutTrainingConfig):
        bucket = int(config.resharding.bucket_mib * _MIB)
    for name in config.groups:
        # What is the actor without its adapters takes nothing.
        specs = {role: spec for role, spec in role_specs(config, name).items() if not spec.is_base}
        made = dict[tuple[str, int], RoleMemory]()
        for rank, device in enumerate(config.device_list(name)):
            roles: dict[str, RoleMemory] = {}
            for role, spec in specs.items():
                stage = spec.layout.coords(rank).pp
                if (role, stage) not in made:
                    made[role, stage] = _role_memory(config, spec, stage)
                roles[role] = made[role, stage]
            sharing: dict[str, int] = {}
            for role, spec in specs.items():
                if roles[role].frozen:
                    sharing[role] = _sharing(config, spec, name, device)
            plans[device] = DevicePlan(
                device=device, kind=kind, roles=roles, bucket=bucket, saved=saved, sharing=sharing
            )
    if rollout is not None:
        spec = model_spec(config.model.hf_config())
        lora = config.separate_adapters
        adapters = None if lora is None else adapters_of(lora)
        engine = EngineRankMemory.of(spec, rollout, kind, lambda: capacity(config).device_bytes, adapters)
        sleeps = rollout.sleep and kind == "cuda"
        field = "rollout.kv_cache_mib"
        if rollout.gpu_memory_fraction is not None:
            field = "rollout.gpu_memory_fraction"
        for device in parse_devices(rollout.devices):
            plan = plans.get(device, DevicePlan(device=device, kind=kind, bucket=bucket))
            plans[device] = replace(
                plan,
                engine=engine,
                cache_field=field,
                sleeps=sleeps,
                keeps_weights=lora is not None,
            )
    judge = config.judge_model
    if judge is not None:
        spec = model_spec(read_config(judge.path))
        engine = EngineRankMemory.of(spec, judge.rollout, kind, lambda: capacity(config).device_bytes)
        field = "reward.judge_model.kv_cache_mib"
        for device in parse_devices(judge.devices):
            plans[device] = DevicePlan(device=device, kind=kind, engine=engine, cache_field=field)
    if kind == "cuda":
        for device, plan in plans.items():
            plans[device] = replace(plan, nccl=nccl_bytes(config, device))
    return plans


def _sharing(config: RunConfig, spec: RoleSpec, group: str, device: int) -> int:
    """Returns the number of ranks on a device's node that have the same weights of a role."""
    per_node = config.cluster.devices_per_node
    parts: dict[int, tuple[int, ...]] = {}
    for rank, other in enumerate(config.device_list(group)):
        coords = spec.layout.coords(rank)
        parts[other] = (other // per_node, coords.tp, coords.pp, spec.layout.expert_rank(coords))
    return list(parts.values()).count(parts[device])


def _saves_meanwhile(config: TrainingConfig) -> bool:
    """Whether a checkpoint but the last one is made, and written during the training."""
    every = config.checkpoint.every
    last = config.run.steps
    return config.checkpoint.async_save and every is not None and (last is None or every < last)


def _role_memory(config: RunConfig, spec: RoleSpec, stage: int) -> RoleMemory:
    largest = config.largest_batches
    budget = max(config.role(spec.name).tokens_per_micro_batch, largest.tokens)
    dp = spec.layout.dp
    tokens = -(-largest.update // dp) * largest.tokens
    reference: ModelSpec | None = None
    if spec.reads_distributions:
        reference = _model_of(config, config.role_checkpoint("reference"), "reference")
    return role_memory(
        spec,
        _model_of(config, spec.checkpoint, spec.name),
        stage,
        config.cluster.device,
        pack=min(budget, -(-largest.inference // dp) * largest.tokens),
        update_pack=min(budget, tokens),
        micro_batches=-(-tokens // budget),
        reference=reference,
    )


def _model_of(config: RunConfig, checkpoint: str | None, role: RoleName) -> ModelSpec:
    own = model_spec(config.model.hf_config())
    if checkpoint is None:
        return own
    model = model_spec(read_config(checkpoint))
    return model.with_rows_of(own) if role == "reference" else model
