"""The memory that a run takes on each device in each phase, from its configuration and its models' sizes alone.

Parameters, gradients, optimizer state and caches are exact. Activations are those that the backward pass of Megatron's
local layers keeps (megarl/megatron/model.py), for packs as long as they may become, whose tokens are all of responses.
What vLLM and CUDA take besides is an allowance. All sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megarl.config import (
    EvalConfig,
    PPOConfig,
    RAFTConfig,
    RewardModelConfig,
    RunConfig,
    SFTConfig,
    TrainingConfig,
    parse_devices,
)
from megarl.config.schema import Rollout
from megarl.models import ModelSpec, model_spec
from megarl.preflight.capacity import capacity
from megarl.role_specs import PolicySpec, RoleSpec, role_specs
from megarl.rollout.engine_memory import PROCESS, EngineRankMemory
from megarl.types import HEADS, Layout, RankCoords, RoleName
from megarl.weights.hf_files import read_config
from megarl.weights.shard_map import ITEM_BYTES

_MIB = 1 << 20
_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once (``megatron.logprobs``)."""

EXACT = ("parameters", "gradients", "optimizer", "weights", "cache", "snapshot")


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The memory of a device in a phase.

    Args:
        role: that works, or none.
        optimizer: state, and the average of the weights.
        activations, logits: of a forward pass, and of a backward pass where there is one.
        stepping: Adam's intermediate results, when the activations are gone.
        weights, cache, engine: of a vLLM engine: weights, key-value cache, and the rest with CUDA graphs.
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
class RoleMemory:
    """A role on a rank; ``pack`` and ``update_pack`` are the longest packs of inference and of an optimizer step."""

    spec: RoleSpec
    model: ModelSpec
    layout: Layout
    stage: int
    device: str
    pack: int
    update_pack: int
    micro_batches: int

    @cached_property
    def _numels(self) -> dict[str, int]:
        coords = RankCoords(tp=0, dp=0, pp=self.stage)
        params = self.model.megatron_map(self.layout, self.layout.rank(coords), HEADS[self.spec.name]).params
        return {name: math.prod(info.shape) for name, info in params.items()}

    @property
    def parameters(self) -> int:
        return sum(self._numels.values()) * self._item

    @property
    def gradients(self) -> int:
        return 4 * sum(self._numels.values())

    @property
    def optimizer(self) -> int:
        training = self.spec.training
        if training is None:
            return 0
        columns = 2 + (self._item < 4) + (training.ema_decay is not None)  # moments, float32 weights, average
        return 4 * columns * sum(self._shards.values())

    @property
    def stepping(self) -> int:
        """Of torch's Adam: one term of all weights at once on CUDA, two of each in turn on a CPU."""
        return 4 * sum(self._shards.values()) if self.device == "cuda" else 8 * max(self._shards.values())

    @property
    def _shards(self) -> dict[str, int]:
        """Elements of each parameter that this rank's optimizer has."""
        dp, ep = self.layout.dp, self.layout.ep
        return {name: -(-n // (dp // ep if "mlp.experts." in name else dp)) for name, n in self._numels.items()}

    @property
    def state(self) -> int:
        """What the role has on its device while it is not offloaded."""
        return self.parameters + self.optimizer

    @property
    def snapshot(self) -> int:
        """Returns what this rank writes of a checkpoint: replicas share the parameters, and have parts of the rest."""
        return self.parameters // self.layout.dp + self.optimizer

    def inference(self) -> tuple[int, int]:
        """Returns the activations of a forward pass, which hold one layer at a time, and the logits."""
        dims, tp = self.model.dims, self.layout.tp
        attention = (4 * dims.heads + 6 * dims.kv_heads) * dims.head_dim / tp
        mlp = 5 * dims.ffn * self._experts / tp
        elements = 3 * dims.hidden + max(attention, mlp)
        return int(self.pack * elements * self._item), self._logits(self.pack)

    def update(self) -> tuple[int, int]:
        """Returns the activations that a backward pass keeps, and the logits with the head's gradients."""
        layers = [len(self.model.layers(self.layout, self.stage, chunk)) for chunk in range(self.layout.vpp)]
        kept, whole = self._kept_by_layer(), self._layer()
        layers_bytes = kept * max(layers) * self._in_flight()
        logits = self._logits(self.update_pack)
        hidden = self.model.dims.hidden * self._item * self._split
        ends = (3 * hidden + self._norm(self.model.dims.hidden) * self._split) if self._last else hidden
        if self._last and HEADS[self.spec.name] == "lm":
            vocab = self._vocab_rows * self.model.dims.hidden
            logits += vocab * (4 + self._item) + self.update_pack * self.model.dims.hidden * self._item
        # A layer is computed again when the logits are gone.
        again = max(0.0, self.update_pack * whole - logits) if self.spec.recompute == "full" else 0.0
        return int(self.update_pack * (layers_bytes + ends) + again), logits

    def _in_flight(self) -> int:
        """Returns the micro-batches, or those of chunks, whose activations a stage holds at once."""
        pp, vpp = self.layout.pp, self.layout.vpp
        if vpp == 1:
            return min(pp - self.stage, self.micro_batches)
        return min(2 * (pp - self.stage - 1) + (vpp - 1) * pp + 1, self.micro_batches * vpp)

    def _kept_by_layer(self) -> float:
        """Returns the bytes of a token that a layer keeps for its backward pass."""
        hidden = self.model.dims.hidden * self._item * self._split
        return hidden if self.spec.recompute == "full" else self._layer()

    def _layer(self) -> float:
        dims, tp, item = self.model.dims, self.layout.tp, self._item
        norms = 2 * self._norm(dims.hidden) * self._split
        rope = 4 * dims.head_dim * item if self.model.rope is not None else 0
        qkv = (dims.heads + 2 * dims.kv_heads) * dims.head_dim * item / tp
        one = dims.heads * dims.head_dim * item / tp  # queries, or the attention's output
        kv = 2 * dims.kv_heads * dims.head_dim * item / tp
        if self.spec.recompute == "selective":
            attention = one + kv / 2 + qkv + one  # values are a part of what is projected
        elif self.device == "cuda" and item < 4:
            attention = one + kv / 2 + qkv + one + 4 * dims.heads / tp
        else:
            attention = 3 * one + kv + 4 * dims.heads / tp  # in rectangles
        if self.model.table.megatron.get("qk_layernorm"):
            heads = (dims.heads + dims.kv_heads) / tp
            attention += (qkv + one if item == 4 else 4 * (one + kv / 2) / item) + one + kv / 2 + 4 * heads
        return norms + rope + attention + self._mlp()

    def _norm(self, size: int) -> float:
        """Returns the bytes of a norm and of its output: RMSNorm keeps its input and the quotient, LayerNorm one."""
        if self.model.table.megatron["normalization"] == "LayerNorm":
            return 2 * size * self._item + 8
        return size * (4 + 2 * self._item) + 4

    def _mlp(self) -> float:
        dims, tp = self.model.dims, self.layout.tp
        ffn = dims.ffn * self._item / tp
        if dims.experts:
            return self._experts * (6 * ffn + dims.hidden * self._item) + 16 * dims.experts
        return (5 if self.model.table.megatron["gated_linear_unit"] else 2) * ffn

    def _logits(self, tokens: int) -> int:
        if not self._last or HEADS[self.spec.name] != "lm":
            return 0
        return 8 * min(_CHUNK_TOKENS, tokens) * self._vocab_rows

    @property
    def _item(self) -> int:
        return ITEM_BYTES[self.model.dtype]

    @property
    def _split(self) -> float:
        """The part of the tokens that this rank has between the tensor-parallel regions."""
        return 1 / self.layout.tp if self.layout.sequence_parallel else 1.0

    @property
    def _experts(self) -> int:
        """Experts of a token, if tokens are spread evenly."""
        return self.model.table.megatron.get("moe_router_topk", 1)

    @property
    def _last(self) -> bool:
        return self.stage == self.layout.pp - 1

    @property
    def _vocab_rows(self) -> int:
        return self.model.dims.padded_vocab("megatron", self.layout.tp) // self.layout.tp


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """A device: its roles by name, and its engine.

    Args:
        bucket: most bytes of a message of a sync.
        sleeps: the engine gives weights and cache back while the trainers work.
        saved: roles of checkpoints that are written while the training goes on.
    """

    device: int
    kind: str
    roles: Mapping[RoleName, RoleMemory] = field(default_factory=dict[RoleName, RoleMemory])
    engine: EngineRankMemory | None = None
    bucket: int = 0
    sleeps: bool = False
    saved: Collection[RoleName] = ()

    def phases(self) -> Iterator[PhaseMemory]:
        """Yields the phases, each with the role that takes most in it."""
        if self.engine is not None:
            yield self._with_engine(self._idle("generate", None), awake=True, generates=True)
        if not self.roles:
            return
        asleep = self.sleeps
        yield max((self._inference(role, not asleep) for role in self.roles), key=lambda phase: phase.peak)
        trained: list[RoleName] = [role for role, memory in self.roles.items() if memory.spec.training is not None]
        if trained:
            yield max((self._update(role, not asleep) for role in trained), key=lambda phase: phase.peak)
        if self.bucket and ("actor" in self.roles or self.engine is not None):
            yield self._sync()
        if trained:
            saved = (self._with_engine(self._idle("checkpoint", role), awake=not asleep) for role in trained)
            yield max(saved, key=lambda phase: phase.peak)

    def _inference(self, role: RoleName, awake: bool) -> PhaseMemory:
        activations, logits = self.roles[role].inference()
        phase = replace(self._idle("inference", role), activations=activations, logits=logits)
        return self._with_engine(phase, awake=awake)

    def _update(self, role: RoleName, awake: bool) -> PhaseMemory:
        memory = self.roles[role]
        training, (activations, logits) = memory.spec.training, memory.update()
        assert training is not None
        divergence = isinstance(training.loss, PolicySpec) and training.loss.algo.kl.of_distributions
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
        buckets = 2 * min(self.bucket, self.roles["actor"].parameters) if role else 0
        if self.engine is not None:
            buckets += 2 * min(self.bucket, self.engine.weights)
        phase = self._with_engine(replace(phase, buckets=buckets), awake=True)
        return replace(phase, cache=0) if self.sleeps else phase

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
            process=PROCESS[self.kind] * (bool(self.roles) + (self.engine is not None)),
            snapshot=snapshot - on_host,
            offloaded=sum(role.state for role in self.roles.values()) - sum(role.state for role in here) + on_host,
        )

    def _with_engine(self, phase: PhaseMemory, *, awake: bool, generates: bool = False) -> PhaseMemory:
        if self.engine is None:
            return phase
        weights, cache = (self.engine.weights, self.engine.cache) if awake else (0, 0)
        return replace(phase, weights=weights, cache=cache, engine=self.engine.work if generates else 0)


def plan_memory(config: RunConfig) -> list[DevicePlan]:
    """Returns every device that the run uses."""
    kind, plans = config.cluster.device, dict[int, DevicePlan]()
    rollout = engine_settings(config)
    saved = config.saved if isinstance(config, TrainingConfig) and _saves_meanwhile(config) else ()
    bucket = int(config.resharding.bucket_mib * _MIB) if isinstance(config, PPOConfig | RAFTConfig) else 0
    for name in config.groups:
        specs, made = role_specs(config, name), dict[tuple[RoleName, int], RoleMemory]()
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
        engine = EngineRankMemory.of(spec, rollout, kind, lambda: capacity(config).of_device)
        sleeps = rollout.sleep and kind == "cuda"
        for device in parse_devices(rollout.devices):
            plan = plans.get(device, DevicePlan(device=device, kind=kind, bucket=bucket))
            plans[device] = replace(plan, engine=engine, sleeps=sleeps)
    judge = config.reward.judge_model if isinstance(config, PPOConfig | RAFTConfig | EvalConfig) else None
    if judge is not None:
        spec = model_spec(read_config(judge.path))
        engine = EngineRankMemory.of(spec, judge.rollout, kind, lambda: capacity(config).of_device)
        for device in parse_devices(judge.devices):
            plans[device] = DevicePlan(device=device, kind=kind, engine=engine)
    return [plans[device] for device in sorted(plans)]


def _saves_meanwhile(config: TrainingConfig) -> bool:
    """Whether a checkpoint but the last one is made, and written while the training goes on."""
    every, last = config.checkpoint.every, config.run.steps
    return config.checkpoint.async_save and every is not None and (last is None or every < last)


def engine_settings(config: RunConfig) -> Rollout | None:
    """Returns the section rollout, if the stage has engines."""
    if isinstance(config, SFTConfig):
        return None
    assert isinstance(config, PPOConfig | RAFTConfig | RewardModelConfig | EvalConfig)
    return config.rollout


def _role_memory(config: RunConfig, spec: RoleSpec, stage: int) -> RoleMemory:
    hf_config = config.model.hf_config() if spec.checkpoint is None else read_config(spec.checkpoint)
    longest, inferred, updated = _work(config)
    budget, dp = max(config.role(spec.name).tokens_per_micro_batch, longest), spec.layout.dp
    tokens = -(-updated // dp) * longest
    return RoleMemory(
        spec=spec,
        model=model_spec(hf_config),
        layout=spec.layout,
        stage=stage,
        device=config.cluster.device,
        pack=min(budget, -(-inferred // dp) * longest),
        update_pack=min(budget, tokens),
        micro_batches=-(-tokens // budget),
    )


def _work(config: RunConfig) -> tuple[int, int, int]:
    """Returns the most tokens of a sequence, and the most sequences of an inference pass and of an optimizer step."""
    if isinstance(config, SFTConfig):
        return config.data.max_tokens, config.data.sequences_per_step, config.data.sequences_per_step
    if isinstance(config, RewardModelConfig):
        return 2 * config.data.max_tokens, config.data.pairs_per_step, config.data.pairs_per_step
    assert isinstance(config, PPOConfig | RAFTConfig | EvalConfig)
    if isinstance(config, EvalConfig):
        return config.rollout.max_model_len, 1 << 20, 1
    samples = config.data.prompts_per_step * config.data.samples_per_prompt
    mini_batches = config.algo.mini_batches if isinstance(config, PPOConfig) else config.raft.mini_batches
    return config.rollout.max_model_len, samples, -(-samples // mini_batches)
