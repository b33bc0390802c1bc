"""The memory plan of whole runs by hand, refusals, and suggested settings."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megarl.cli import app
from megarl.config import ConfigError, load
from megarl.models import model_spec
from megarl.preflight.device_memory import check_memory
from megarl.preflight.memory_plan import PhaseMemory, besides_cache, plan_memory
from megarl.preflight.nccl_memory import CHANNEL, COMMUNICATOR, NVLS, PEER
from megarl.rollout.engine_memory import BLOCK_TOKENS, cache_bytes
from megarl.stages.ppo.config import PPOConfig

GIB = 1 << 30
MIB = 1 << 20
MODEL = {
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "vocab_size": 1280,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
LAYER = 256 * (256 + 2 * 128) + 512 + 256 * 256 + 3 * 256 * 512 + 2 * 256
PARAMETERS = 1280 * 256 + 4 * LAYER + 256
PROMPTS = {"count": 64, "min_tokens": 8, "max_tokens": 512}
LARGE = {
    **MODEL,
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
"""70 billion parameters."""


def written(directory: Path, model: dict[str, Any] = MODEL, **sections: Any) -> Path:
    """A GRPO run whose model is a directory with only a config.json."""
    (directory / "config.json").write_text(json.dumps(model))
    role = {"tokens_per_micro_batch": 4096}
    fields = {
        "stage": "ppo",
        "run": {"dir": str(directory / "run"), "steps": 1},
        "model": {"path": str(directory)},
        "cluster": {"devices_per_node": 4},
        "groups": {"train": {"devices": "0", "roles": {"actor": role, "reference": role}}},
        "rollout": {"devices": "0", "max_new_tokens": 512, "max_model_len": 1024, "kv_cache_mib": 2048, "sleep": False},
        "data": {"random": PROMPTS, "prompts_per_step": 16, "samples_per_prompt": 4},
        "algo": {"advantage": "grpo", "kl": {"in": "loss", "estimator": "k3", "coef": 0.01}, "mini_batches": 1},
        "actor": {"optimizer": {"lr": 1e-6}},
        "reward": {"functions": [{"name": "length"}]},
    }
    path = directory / "run.yaml"
    path.write_text(json.dumps({**fields, **sections}))
    return path


def phases(path: Path, *overrides: str, device: int = 0) -> dict[str, PhaseMemory]:
    plans = {plan.device: plan for plan in plan_memory(load(path, overrides))}
    return {phase.phase: phase for phase in plans[device].phases()}


def plan(path: Path, *overrides: str) -> Result:
    return CliRunner().invoke(app, ["plan", "memory", str(path), *overrides])


def test_role_states_by_hand(tmp_path: Path) -> None:
    """In bfloat16 an actor has 2 bytes a parameter, float32 gradients, and 12 bytes for its optimizer."""
    found = phases(written(tmp_path))
    assert list(found) == ["generate", "inference", "update", "sync", "checkpoint"]
    for phase in found.values():
        assert (phase.parameters, phase.optimizer) == (2 * 2 * PARAMETERS, 12 * PARAMETERS)
        assert (phase.weights, phase.cache) == (2 * PARAMETERS, 2 * GIB)
        assert phase.gradients == (4 * PARAMETERS if phase.phase == "update" else 0)
        assert bool(phase.buckets) == (phase.phase == "sync")
        assert phase.engine == found["generate"].engine > GIB, "an allocator and the graphs keep it"
    assert found["sync"].buckets == 4 * 2 * PARAMETERS  # a bucket of 256 MiB would be larger than the model
    update = found["update"]
    assert update.stepping == 4 * 1280 * 256, "Adam is fused: the clipped gradient of the embedding"
    fixed = update.exact + update.process + update.engine
    assert update.peak == fixed + update.activations + update.logits


def test_replicas_shard_the_optimizer_and_stages_the_layers(tmp_path: Path) -> None:
    groups = {"train": {"devices": "0-1", "roles": {"actor": {"tokens_per_micro_batch": 4096}}}}
    algo = {"advantage": "grpo", "mini_batches": 1, "kl": {"coef": 0}}
    path, actor = written(tmp_path, groups=groups, algo=algo), "groups.train.roles.actor"
    replicas = phases(path, "rollout.devices=3", device=1)["update"]
    assert replicas.parameters == 2 * PARAMETERS
    assert replicas.gradients == 4 * PARAMETERS
    assert replicas.optimizer == pytest.approx(12 * PARAMETERS / 2, abs=12 * 100)
    stages = [phases(path, "rollout.devices=3", f"{actor}.pp=2", device=device)["update"] for device in (0, 1)]
    embedding, layers = 1280 * 256, 2 * LAYER
    assert [stage.parameters for stage in stages] == [2 * (embedding + layers), 2 * (embedding + layers + 256)]
    kept = stages[1].activations - 4096 * (3 * 512 + 256 * 4 + 4)  # but for the last norm and the head's input
    assert stages[0].activations == 2 * kept + 4096 * 512, "the first stage has two micro-batches in progress"
    assert [bool(stage.logits) for stage in stages] == [False, True]


def test_sleeping_engines_and_offloaded_roles_free_their_memory(tmp_path: Path) -> None:
    roles = [f"groups.train.roles.{role}.offload=true" for role in ("actor", "reference")]
    found = phases(written(tmp_path), "rollout.sleep=true", *roles)
    actor, reference = 14 * PARAMETERS, 2 * PARAMETERS
    generate, update, sync = found["generate"], found["update"], found["sync"]
    assert (generate.parameters, generate.optimizer, generate.offloaded) == (0, 0, actor + reference)
    assert (generate.weights, generate.cache) == (2 * PARAMETERS, 2 * GIB)
    assert (update.parameters, update.optimizer, update.offloaded) == (2 * PARAMETERS, 12 * PARAMETERS, reference)
    stays = GIB + 1024 * (4 * 1280 + 1280 // 8) + 32 * MIB  # graphs, counts of tokens, workspace of cuBLAS
    assert (update.weights, update.cache, update.engine) == (0, 0, stays)
    assert (sync.weights, sync.cache, sync.engine) == (2 * PARAMETERS, 0, stays)
    assert update.process == 2 * (6 * GIB // 10) + 2 * 32 * MIB, "the trainer has a workspace for each pass"


def test_a_checkpoint_that_is_written_during_the_steps_takes_memory(tmp_path: Path) -> None:
    """Of the host, which on a CPU is the device; the last checkpoint is not."""
    path, saves = (
        written(tmp_path, cluster={"device": "cpu", "devices_per_node": 4}),
        ["run.steps=9", "checkpoint.every=4"],
    )
    copy, one_tensor = 14 * PARAMETERS, 2 * 4 * 1280 * 256  # the embedding is the largest

    def snapshots(*overrides: str) -> set[int]:
        found = phases(path, *overrides)
        assert found["checkpoint"].snapshot == found["update"].snapshot + one_tensor
        return {phase.snapshot for phase in found.values() if phase.phase != "checkpoint"}

    assert snapshots(*saves) == {copy}
    for without in ([*saves, "checkpoint.async_save=false"], ["run.steps=9"], ["run.steps=4", "checkpoint.every=4"]):
        assert snapshots(*without) == {0}
    on_gpu = phases(path, *saves, "cluster.device=cuda")
    assert [(on_gpu[name].snapshot, on_gpu[name].offloaded) for name in ("update", "checkpoint")] == [
        (0, copy),
        (0, copy + one_tensor),
    ]
    room = f"cluster.device_memory_gib={(phases(path, *saves)['update'].exact - copy // 2) / GIB}"
    refused = plan(path, *saves, room)
    assert refused.exit_code == 2
    assert "memory of device 0" in refused.output
    assert plan(path, *saves, room, "checkpoint.async_save=false").exit_code == 0


def test_recomputation_reduces_memory(tmp_path: Path) -> None:
    path, field = written(tmp_path), "groups.train.roles.actor"
    none, full = (phases(path, f"{field}.recompute={how}")["update"].activations for how in ("none", "full"))
    assert full < none / 3
    small = phases(path, f"{field}.tokens_per_micro_batch=1024")["update"].activations
    assert small == pytest.approx(none / 4, rel=1e-3)


def test_norms_of_transformer_engine_keep_less(tmp_path: Path) -> None:
    """Of each norm, the input and the output in 16 bits; op by op, RMSNorm also keeps the input in float32."""
    path = written(tmp_path)
    reference = "model.kernels=reference"
    own, fused = (
        phases(path, reference, f"model.layers={kind}")["update"].activations
        for kind in ("local", "transformer_engine")
    )
    norm, fused_norm = 256 * (2 + 4 + 2) + 4, 256 * (2 + 2) + 8
    assert own - fused == 4096 * (2 * 4 + 1) * (norm - fused_norm)
    auto = phases(path, reference)["update"].activations
    assert auto == own, "it may find none, and is planned as Megatron's own"


def test_packs_are_no_longer_than_the_tokens_of_a_step(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole, two = (phases(path, f"data.prompts_per_step={count}", "data.samples_per_prompt=2") for count in (4, 1))
    assert two["update"].activations == pytest.approx(whole["update"].activations / 2, rel=1e-3)


@pytest.mark.process
def test_a_run_that_cannot_fit_is_refused_from_config_json_alone(tmp_path: Path) -> None:
    """An actor of 70 billion parameters and a cache of 500 GB on one GPU."""
    path = written(tmp_path, LARGE)
    result = plan(path, "rollout.kv_cache_mib=500000")
    assert result.exit_code == 2
    assert result.stderr.count("rule: ") == 5, "it fits in no phase"
    assert "rule: generate must fit into 268.0 GiB" in result.stderr
    assert "update on device 0 may not fit" in result.stdout
    assert "set rollout.sleep=true, and raise groups.train.roles.actor.tp or pp" in result.stderr, "one is too little"
    assert "generate " in result.stdout


def test_an_engine_on_a_cpu_has_a_copy_of_its_output_layer_and_a_buffer(tmp_path: Path) -> None:
    """And in a batch, logits or activations, whichever are more."""
    path = written(tmp_path, {**MODEL, "vocab_size": 64000})
    copies, activations = 2 * 256 * (64000 + 4096), 2 * 4096 * 4 * (256 + 512)
    config = json.loads(path.read_text())
    del config["algo"], config["groups"]["train"]["roles"]["reference"]
    raft = path.with_name("raft.yaml")
    raft.write_text(json.dumps({**config, "stage": "raft", "algo": {"select": None}}))
    plain, filtered = (
        {name: phase.engine for name, phase in phases(file, "cluster.device=cpu", *overrides).items()}
        for file, overrides in ((path, ()), (raft, ("rollout.top_p=0.9",)))
    )
    assert plain.pop("generate") == copies + 8 * 256 * 64000 > copies + activations
    assert filtered["generate"] == copies + 21 * 256 * 64000
    assert plain.pop("sync") == copies + 2 * 256 * 64000, "the largest weight is packed again"
    assert set(plain.values()) == {copies}
    assert phases(written(tmp_path), "cluster.device=cpu")["generate"].engine == 512 * (1280 + 4096) + activations


@pytest.mark.parametrize(
    ("overrides", "phase", "fix"),
    [
        (["rollout.kv_cache_mib=8000"], "generate", "lower rollout.kv_cache_mib"),
        (["rollout.kv_cache_mib=null", "rollout.gpu_memory_fraction=0.99"], "generate", "rollout.gpu_memory_fraction"),
        (
            ["model.kernels=reference", "groups.train.roles.actor.tokens_per_micro_batch=999999"],
            "update",
            "roles.actor.recompute=full",
        ),
    ],
)
def test_a_run_that_may_not_fit_is_warned_about_with_a_setting_that_helps(
    tmp_path: Path, overrides: list[str], phase: str, fix: str
) -> None:
    result = plan(written(tmp_path), "cluster.device_memory_gib=5", *overrides)
    (worry,) = [line for line in result.stdout.splitlines() if f" {phase} on device 0 may not fit" in line]
    assert fix in worry


def test_the_suggested_settings_make_a_run_fit(tmp_path: Path) -> None:
    path, small = written(tmp_path), "cluster.device_memory_gib=3"
    result = plan(path, small)
    assert result.exit_code == 0
    fixes = {line.split(": ")[1] for line in result.stdout.splitlines() if "may not fit" in line}
    assert fixes == {"lower rollout.kv_cache_mib", "set rollout.sleep=true"}
    assert "may not fit" not in plan(path, small, "rollout.kv_cache_mib=512", "rollout.sleep=true").stdout


FRACTION = ["rollout.kv_cache_mib=null", "rollout.gpu_memory_fraction=0.5"]


def test_the_gpu_memory_fraction_includes_all_of_an_engine(tmp_path: Path) -> None:
    path, alone = written(tmp_path), ["rollout.devices=3", "cluster.device_memory_gib=24"]
    (generate,) = [found for name, found in phases(path, *FRACTION, *alone, device=3).items() if name == "generate"]
    assert generate.peak - generate.nccl == 12 * GIB
    assert generate.weights + generate.cache + generate.engine + generate.process == 12 * GIB
    assert generate.nccl == 4 * CHANNEL, "from the actor"
    given = load(path, [*FRACTION, *alone])
    assert isinstance(given, PPOConfig)
    model = model_spec(given.model.hf_config())
    assert cache_bytes(model, given.rollout, "cuda", 24 * GIB) == generate.cache  # the engine's memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    on_cpu = phases(path, *FRACTION, "cluster.device=cpu", device=0)["generate"]
    assert on_cpu.weights + on_cpu.cache + on_cpu.engine + 6 * GIB // 10 == machine // 2
    assert cache_bytes(model, given.rollout, "cpu") == on_cpu.cache


def test_a_fraction_that_leaves_no_cache_is_refused(tmp_path: Path) -> None:
    given = load(written(tmp_path), [*FRACTION, "cluster.device_memory_gib=3"])
    with pytest.raises(ConfigError) as refusal:
        check_memory(given)
    (problem,) = refusal.value.problems
    assert problem.field == "rollout.gpu_memory_fraction"
    least = float(re.findall(r"above ([\d.]+)", problem.fix)[0])
    check_memory(
        load(written(tmp_path), [*FRACTION, "cluster.device_memory_gib=3", f"{FRACTION[1][:-3]}{least + 0.02}"])
    )
    assert isinstance(given, PPOConfig)
    with pytest.raises(ValueError, match="leaves no cache"):
        cache_bytes(model_spec(given.model.hf_config()), given.rollout, "cuda", 3 * GIB)


@pytest.mark.parametrize(
    ("changes", "devices", "groups", "senders"),
    [
        ([], [0], 0, 0),
        # An engine's trainer has all weights.
        (["groups.train.devices=0-3", "rollout.devices=0-3"], [0, 3], COMMUNICATOR + 4 * NVLS, 0),
        (
            ["groups.train.devices=0-3", "rollout.devices=0-3", "rollout.tp=2", "tp=2"],
            [0, 3],
            4 * COMMUNICATOR + 4 * NVLS,  # TP, DP, all four and the engine's
            3,
        ),
        (["groups.train.devices=0-2", "rollout.devices=0-2", "pp=3"], [0, 1], 2 * PEER + COMMUNICATOR + 3 * NVLS, 2),
        (["groups.train.devices=0-1", "rollout.devices=2-3", "pp=2"], [2, 3], 0, 2),
    ],
)
def test_buffers_of_nccl(tmp_path: Path, changes: list[str], devices: list[int], groups: int, senders: int) -> None:
    """Those of each group of a layout and of an engine's ranks, and of each sender to it."""
    given: list[str] = []
    for change in changes:
        split = change.startswith(("tp", "pp"))
        given += [f"groups.train.roles.{role}.{change}" for role in ("actor", "reference")] if split else [change]
    for device in devices:
        found = phases(written(tmp_path), *given, device=device)
        nbytes = groups + senders * 4 * CHANNEL
        assert {phase.nccl for phase in found.values()} == {nbytes}
        cpu = phases(written(tmp_path), *given, "cluster.device=cpu", device=device)
        assert {phase.nccl for phase in cpu.values()} == {0}


SEQUENCE = 33 * BLOCK_TOKENS * 4 * 2 * 4 * 32 * 2
"""Keys and values of 1024 tokens and one, in blocks, of 4 layers with 4 heads in 16 bits."""
NULL = "rollout.kv_cache_mib=null"


def test_a_cache_of_no_configured_size_fills_the_gpu(tmp_path: Path) -> None:
    """Beside what is there with it: in `generate` if the engine sleeps, else in every phase."""
    path, room = written(tmp_path), "cluster.device_memory_gib=4"
    roles = [f"groups.train.roles.{role}.offload=true" for role in ("actor", "reference")]
    for sleeps in (["rollout.sleep=true"], ["rollout.sleep=true", *roles], ["rollout.sleep=false"]):
        given = load(path, [NULL, room, *sleeps])
        found = phases(path, NULL, room, *sleeps)
        held = [phase for phase in found.values() if phase.cache]
        assert (held == [found["generate"]]) == ("rollout.sleep=true" in sleeps)
        (cache,) = {phase.cache for phase in held}
        assert SEQUENCE < cache < 1024 * SEQUENCE
        assert max(phase.peak for phase in held) == int(0.95 * 4 * GIB)
        assert isinstance(given, PPOConfig)
        model = model_spec(given.model.hf_config())
        assert cache_bytes(model, given.rollout, "cuda", 4 * GIB, besides_cache(given)) == cache  # the engine's
    assert phases(path, NULL, "cluster.device_memory_gib=80")["generate"].cache == 1024 * SEQUENCE
    assert phases(path, NULL, "cluster.device=cpu")["generate"].cache == 4 * GIB
    assert besides_cache(load(path, [NULL, "cluster.device=cpu"])) == 0


def test_all_caches_are_as_large_as_the_fullest_gpu_allows(tmp_path: Path) -> None:
    engines = ["rollout.devices=0-3", "rollout.tp=2", "cluster.device_memory_gib=3"]
    found = [phases(written(tmp_path), NULL, *engines, device=device) for device in range(4)]
    (cache,) = {plan["generate"].cache for plan in found}
    assert max(phase.peak for phase in found[0].values()) == int(0.95 * 3 * GIB)
    assert SEQUENCE / 2 < cache < 1024 * SEQUENCE / 2, "each rank has half of the heads"


def test_a_gpu_without_room_for_a_sequence_is_refused_before_the_start(tmp_path: Path) -> None:
    path = written(tmp_path)
    result = plan(path, NULL, "cluster.device_memory_gib=2")
    assert result.exit_code == 2
    assert "rollout.kv_cache_mib" in result.stderr
    assert "set rollout.sleep=true" in result.stderr
    given = load(path, [NULL])
    assert isinstance(given, PPOConfig)
    with pytest.raises(ValueError, match="no room for a cache of one sequence"):
        cache_bytes(model_spec(given.model.hf_config()), given.rollout, "cuda", 2 * GIB, besides_cache(given))


def test_on_gpus_of_unknown_memory_the_plan_counts_a_cache_and_says_so(tmp_path: Path) -> None:
    path, cluster = written(tmp_path), "cluster.address=10.0.0.1:6379"
    assert phases(path, NULL, cluster, "rollout.max_model_len=4096")["generate"].cache == 4 * GIB
    assert "KV cache is counted as 4 GiB" in plan(path, NULL, cluster).stdout
    assert "KV cache is counted" not in plan(path, NULL, cluster, "cluster.device_memory_gib=80").stdout


def test_virtual_devices_share_the_memory_of_the_machine(tmp_path: Path) -> None:
    path = written(tmp_path)
    engines = ["cluster.device=cpu", "rollout.devices=0-3", "groups.train.devices=0", "rollout.kv_cache_mib=1024"]
    check_memory(load(path, [*engines, "cluster.device_memory_gib=4.5"]))
    with pytest.raises(ConfigError) as refusal:
        check_memory(load(path, [*engines, "cluster.device_memory_gib=4"]))
    assert refusal.value.problems[0].field == "memory of device 0, 1, 2, 3"
    assert {problem.fix for problem in refusal.value.problems} == {"lower rollout.kv_cache_mib"}
