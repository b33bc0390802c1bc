"""The memory that a run takes on each device in each phase, from its configuration and its models' sizes alone.

Parameters, gradients, optimizer state and caches are exact. What vLLM and CUDA take besides is an allowance. All sizes
are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from megarl.config import RolloutTrainingConfig, RunConfig, TrainingConfig, parse_devices
from megarl.config.schema.loss_specs import PolicySpec
from megarl.models import model_spec
from megarl.preflight.capacity import capacity
from megarl.preflight.role_memory import RoleMemory
from megarl.role_specs import RoleSpec, role_specs
from megarl.rollout.engine_memory import PROCESS, EngineRankMemory
from megarl.types import RoleName
from megarl.weights.hf_files import read_config

_MIB = 1 << 20

EXACT = ("parameters", "gradients", "optimizer", "weights", "cache", "snapshot")


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The memory of a device in a phase.

    Args:
        role: that works, or none.
        optimizer: state, and the average of the weights.
        activations, logits: of a forward pass, and of a backward pass where there is one.
        stepping: Adam's intermediate results, when the activations are gone.
        weights, cache, engine: of a vLLM engine: weights, key-value cache, and the rest, see `EngineRankMemory`.
        buckets: of a sync.
        process: of the processes themselves.
        snapshot: of a checkpoint that is being written, on a CPU.
        offloaded: on the host, not on the device; also a snapshot.
    """

    phase: str
    role: RoleName | None = None
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
    snapshot: int = 0
    offloaded: int = 0

    @property
    def exact(self) -> int:
        """Returns what is certain to be needed."""
        return sum(getattr(self, name) for name in EXACT)

    @property
    def peak(self) -> int:
        fixed = self.exact + self.engine + self.buckets + self.process
        return fixed + max(self.activations + self.logits, self.stepping)


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """A device: its roles by name, and its engine.

    Args:
        cache_field: of the configuration, for the size of the engine's cache.
        bucket: most bytes of a message of a sync.
        sleeps: the engine gives weights and cache back while the trainers work.
        saved: roles of checkpoints that are written while the training goes on.
    """

    device: int
    kind: str
    roles: Mapping[RoleName, RoleMemory] = field(default_factory=dict[RoleName, RoleMemory])
    engine: EngineRankMemory | None = None
    cache_field: str = ""
    bucket: int = 0
    sleeps: bool = False
    saved: Collection[RoleName] = ()

    def phases(self) -> Iterator[PhaseMemory]:
        """Yields the phases, each with the role that takes most in it."""
        asleep = self.sleeps
        if self.engine is not None:
            generate = self._with_engine(self._idle("generate", None), awake=True, generates=True)
            kept = self._received if self.kind == "cpu" else 0
            yield replace(generate, buckets=kept)
        if self.roles:
            yield max((self._inference(role, not asleep) for role in self.roles), key=lambda phase: phase.peak)
        trained: list[RoleName] = [role for role, memory in self.roles.items() if memory.spec.training is not None]
        if trained:
            yield max((self._update(role, not asleep) for role in trained), key=lambda phase: phase.peak)
        if self.bucket and ("actor" in self.roles or self.engine is not None):
            yield self._sync()
        if trained:
            yield max((self._checkpoint(role, not asleep) for role in trained), key=lambda phase: phase.peak)

    def _inference(self, role: RoleName, awake: bool) -> PhaseMemory:
        activations, logits = self.roles[role].inference()
        phase = replace(self._idle("inference", role), activations=activations, logits=logits)
        return self._with_engine(phase, awake=awake)

    def _update(self, role: RoleName, awake: bool) -> PhaseMemory:
        memory = self.roles[role]
        training = memory.spec.training
        (activations, logits) = memory.update()
        assert training is not None
        divergence = isinstance(training.loss, PolicySpec) and training.loss.algo.kl.reads_distributions
        others: tuple[RoleName, ...] = ("reference",) if divergence and "reference" in self.roles else ()
        phase = replace(
            self._idle("update", role, *others),
            gradients=memory.gradients,
            activations=activations,
            logits=logits,
            stepping=memory.stepping,
        )
        return self._with_engine(phase, awake=awake)

    def _sync(self) -> PhaseMemory:
        role: RoleName | None = "actor" if "actor" in self.roles else None
        phase = self._idle("sync", role)
        sent = 2 * min(self.bucket, self.roles["actor"].parameters) if role else 0
        phase = self._with_engine(replace(phase, buckets=sent + self._received), awake=True)
        repacked = 0 if self.engine is None else self.engine.repacked
        return replace(phase, engine=phase.engine + repacked, cache=0 if self.sleeps else phase.cache)

    @property
    def _received(self) -> int:
        """The engine's buckets, which it keeps between syncs on a CPU."""
        return 0 if self.engine is None else 2 * min(self.bucket, self.engine.weights)

    def _checkpoint(self, role: RoleName, awake: bool) -> PhaseMemory:
        phase = self._with_engine(self._idle("checkpoint", role), awake=awake)
        written = self.roles[role].written
        if self.kind == "cpu":
            return replace(phase, snapshot=phase.snapshot + written)
        return replace(phase, offloaded=phase.offloaded + written)

    def _idle(self, phase: str, *active: RoleName | None) -> PhaseMemory:
        """Returns what roles and processes have on the device while some roles are active.

        On a CPU, the device is the host to which roles are offloaded.
        """
        stay = {name for name, role in self.roles.items() if not role.spec.offload or self.kind == "cpu"}
        here = [role for name, role in self.roles.items() if name in active or name in stay]
        snapshot = sum(role.snapshot for name, role in self.roles.items() if name in self.saved)
        on_host = 0 if self.kind == "cpu" else snapshot
        return PhaseMemory(
            phase=phase,
            role=active[0],
            parameters=sum(role.parameters for role in here),
            optimizer=sum(role.optimizer for role in here),
            process=PROCESS * (bool(self.roles) + (self.engine is not None)),
            snapshot=snapshot - on_host,
            offloaded=sum(role.state for role in self.roles.values()) - sum(role.state for role in here) + on_host,
        )

    def _with_engine(self, phase: PhaseMemory, *, awake: bool, generates: bool = False) -> PhaseMemory:
        if self.engine is None:
            return phase
        weights, cache = (self.engine.weights, self.engine.cache) if awake else (0, 0)
        works = generates or (self.kind == "cuda" and not self.sleeps)
        return replace(phase, weights=weights, cache=cache, engine=self.engine.kept + self.engine.work * works)


def plan_memory(config: RunConfig) -> list[DevicePlan]:
    """Returns every device that the run uses."""
    kind = config.cluster.device
    plans = dict[int, DevicePlan]()
    rollout = config.engine_settings
    saved = config.saved if isinstance(config, TrainingConfig) and _saves_meanwhile(config) else ()
    bucket = int(config.resharding.bucket_mib * _MIB) if isinstance(config, RolloutTrainingConfig) else 0
    for name in config.groups:
        specs = role_specs(config, name)
        made = dict[tuple[RoleName, int], RoleMemory]()
        for rank, device in enumerate(config.device_list(name)):
            roles: dict[RoleName, RoleMemory] = {}
            for role, spec in specs.items():
                key = role, spec.layout.coords(rank).pp
                if key not in made:
                    made[key] = _role_memory(config, spec, key[1])
                roles[role] = made[key]
            plans[device] = DevicePlan(device=device, kind=kind, roles=roles, bucket=bucket, saved=saved)
    if rollout is not None:
        spec = model_spec(config.model.hf_config())
        engine = EngineRankMemory.of(spec, rollout, kind, lambda: capacity(config).device_bytes)
        sleeps = rollout.sleep and kind == "cuda"
        field = f"rollout.{'kv_cache_mib' if rollout.gpu_memory_fraction is None else 'gpu_memory_fraction'}"
        for device in parse_devices(rollout.devices):
            plan = plans.get(device, DevicePlan(device=device, kind=kind, bucket=bucket))
            plans[device] = replace(plan, engine=engine, cache_field=field, sleeps=sleeps)
    judge = config.judge_model
    if judge is not None:
        spec = model_spec(read_config(judge.path))
        engine = EngineRankMemory.of(spec, judge.rollout, kind, lambda: capacity(config).device_bytes)
        field = "reward.judge_model.kv_cache_mib"
        for device in parse_devices(judge.devices):
            plans[device] = DevicePlan(device=device, kind=kind, engine=engine, cache_field=field)
    return [plans[device] for device in sorted(plans)]


def _saves_meanwhile(config: TrainingConfig) -> bool:
    """Whether a checkpoint but the last one is made, and written while the training goes on."""
    every = config.checkpoint.every
    last = config.run.steps
    return config.checkpoint.async_save and every is not None and (last is None or every < last)


def _role_memory(config: RunConfig, spec: RoleSpec, stage: int) -> RoleMemory:
    hf_config = config.model.hf_config() if spec.checkpoint is None else read_config(spec.checkpoint)
    largest = config.largest_batches
    budget = max(config.role(spec.name).tokens_per_micro_batch, largest.tokens)
    dp = spec.layout.dp
    tokens = -(-largest.update // dp) * largest.tokens
    return RoleMemory(
        spec=spec,
        model=model_spec(hf_config),
        layout=spec.layout,
        stage=stage,
        device=config.cluster.device,
        pack=min(budget, -(-largest.inference // dp) * largest.tokens),
        update_pack=min(budget, tokens),
        micro_batches=-(-tokens // budget),
    )
