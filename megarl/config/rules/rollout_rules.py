"""Rules of engines, of generation, and of the transfer of weights; without engines they all hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.problems import Problem, correct_path, ineffective_settings, shown
from megarl.config.rules.model_rules import known
from megarl.config.rules.placement_rules import beyond_the_cluster
from megarl.config.schema import (
    CheckpointSettings,
    Cluster,
    Evaluation,
    Group,
    Model,
    PeriodicEvaluation,
    PromptData,
    Resharding,
    Rollout,
    Tracking,
)
from megarl.config.schema.base import parse_devices

Groups = Mapping[str, Group]


def engine_devices_exist(cluster: Cluster, rollout: Rollout | None) -> Iterator[Problem]:
    """No device number of an engine reaches beyond the cluster."""
    if rollout is not None:
        yield from beyond_the_cluster(cluster, "rollout.devices", rollout.devices)


def engines_fill_devices(cluster: Cluster, rollout: Rollout | None) -> Iterator[Problem]:
    """Whole engines fill the rollout devices, each within a node."""
    if rollout is None:
        return
    devices = parse_devices(rollout.devices)
    if len(devices) % rollout.tp:
        yield Problem(
            "rollout.tp",
            str(rollout.tp),
            f"divides the {len(devices)} rollout devices ({rollout.devices})",
            f"choose a divisor of {len(devices)}, or change rollout.devices",
        )
        return
    for first in range(0, len(devices), rollout.tp):
        engine = devices[first : first + rollout.tp]
        if len({device // cluster.devices_per_node for device in engine}) > 1:
            yield Problem(
                "rollout.devices",
                rollout.devices,
                f"an engine stays within a node; one would have devices {', '.join(map(str, engine))}",
                f"list {rollout.tp} devices of one node for each engine",
            )


def sleeping_frees_devices(groups: Groups, rollout: Rollout | None) -> Iterator[Problem]:
    """An engine that sleeps makes room for a group."""
    if rollout is None or not rollout.sleep:
        return
    trainers = {device for group in groups.values() for device in parse_devices(group.devices)}
    if not trainers & set(parse_devices(rollout.devices)):
        rule = "has an effect where a group has devices of the engines"
        yield Problem("rollout.sleep", "True", rule, "set it to false")


def new_tokens_in_order(rollout: Rollout | None) -> Iterator[Problem]:
    """A response has room for its least number of tokens."""
    if rollout is not None and rollout.min_new_tokens > rollout.max_new_tokens:
        yield Problem(
            "rollout.min_new_tokens",
            str(rollout.min_new_tokens),
            f"at most rollout.max_new_tokens = {rollout.max_new_tokens}",
            "lower it, or raise rollout.max_new_tokens",
        )


def stops_can_be_met(model: Model, rollout: Rollout | None) -> Iterator[Problem]:
    """Texts that end a response are read by a tokenizer; neither they nor the token ids may be void."""
    if rollout is None:
        return
    if rollout.stop and model.tokenizer is None and model.path is None:
        fix = "set model.tokenizer, or use rollout.stop_token_ids"
        yield Problem("rollout.stop", shown(rollout.stop), "needs a tokenizer", fix)
    if "" in rollout.stop:
        fix = "remove it"
        yield Problem("rollout.stop", shown(rollout.stop), "an empty text is everywhere", fix)
    hf = known(model) or {}
    used = model.vocab_size or hf.get("vocab_size")
    beyond = [token for token in rollout.stop_token_ids if isinstance(used, int) and token >= used]
    if beyond:
        rule = f"below {used}, the number of ids in use: others are never sampled"
        yield Problem("rollout.stop_token_ids", shown(beyond), rule, "remove them")


def quantized_models(cluster: Cluster, model: Model, rollout: Rollout | None) -> Iterator[Problem]:
    """vLLM quantizes 16-bit weights as they arrive; its experts have no such kernel on a CPU (0.28 to 0.32)."""
    hf = known(model)
    if rollout is None or rollout.quantization is None or hf is None:
        return
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32")
    if dtype not in ("bfloat16", "float16"):
        rule = f"the model is of bfloat16 or float16; it is of {dtype}"
        yield Problem("rollout.quantization", rollout.quantization, rule, "set it to null")
    experts = hf.get("num_experts") or hf.get("num_local_experts")
    if experts and cluster.device == "cpu":
        rule = "vLLM cannot quantize experts on a CPU"
        yield Problem("rollout.quantization", rollout.quantization, rule, "set it to null")


def record_or_replay(rollout: Rollout) -> Iterator[Problem]:
    """Rollouts that are read back are not written again, and must exist."""
    if rollout.replay is None:
        return
    if rollout.record is not None:
        fix = "set one of them to null"
        yield Problem("rollout.record", rollout.record, "not together with rollout.replay", fix)
    if not Path(rollout.replay).is_dir():
        fix = f"{correct_path(rollout.replay)}, or make it with rollout.record"
        yield Problem("rollout.replay", rollout.replay, "a directory that exists", fix)


def samples_differ(rollout: Rollout, data: PromptData | None, evaluation: Evaluation | None) -> Iterator[Problem]:
    """Who takes the likeliest token each time answers a prompt once: the other answers would be the same."""
    named = {
        "data.samples_per_prompt": 1 if data is None else data.samples_per_prompt,
        "evaluation.samples_per_prompt": 1 if evaluation is None else evaluation.samples_per_prompt,
    }
    for field, samples in named.items():
        if rollout.top_k == 1 and samples > 1:
            rule, fix = "1 with rollout.top_k = 1: the answers to a prompt would all be the same", "set it to 1"
            yield Problem(field, str(samples), rule, f"{fix}, or rollout.top_k to null")


def nothing_to_record(rollout: Rollout | None) -> Iterator[Problem]:
    """Reference samples and evaluations are neither recorded nor replayed; their weights do not change."""
    if rollout is not None:
        names = ("record", "replay", "sync_every")
        yield from ineffective_settings(
            "rollout", rollout, names, "in a stage that does not train on rollouts", "or use stage ppo"
        )


def nothing_to_show(tracking: Tracking) -> Iterator[Problem]:
    """Only rollouts are samples to read."""
    where = "in a stage without rollouts of the model in training"
    yield from ineffective_settings("tracking", tracking, ("samples",), where, "or use stage ppo")


def transports_are_for_the_cpu(cluster: Cluster, resharding: Resharding) -> Iterator[Problem]:
    """GPUs have one way between each two places."""
    if cluster.device != "cpu" and resharding.transport != "auto":
        yield Problem(
            "resharding.transport",
            resharding.transport,
            f"auto where cluster.device is {cluster.device}",
            "set it to auto",
        )


def shared_memory_stays_within_a_node(
    cluster: Cluster, groups: Mapping[str, Group], rollout: Rollout, resharding: Resharding
) -> Iterator[Problem]:
    """The actor and all engines are on one node where they share memory."""
    if resharding.transport != "shared_memory":
        return
    devices = [device for group in groups.values() if "actor" in group.roles for device in parse_devices(group.devices)]
    nodes = {device // cluster.devices_per_node for device in (*devices, *parse_devices(rollout.devices))}
    if len(nodes) > 1:
        yield Problem(
            "resharding.transport",
            "shared_memory",
            f"within a node; actor and engines are on nodes {', '.join(map(str, sorted(nodes)))}",
            "set it to auto, which shares memory where it can, or to gloo",
        )


def old_weights_are_kept(rollout: Rollout) -> Iterator[Problem]:
    """Engines that sleep drop their weights, and get those of the moment when they wake."""
    if rollout.sleep and rollout.sync_every > 1:
        fix = "set it to 1, or give the engines devices of their own and set rollout.sleep to false"
        yield Problem("rollout.sync_every", str(rollout.sync_every), "1 with rollout.sleep", fix)


def syncs_meet(
    rollout: Rollout, evaluation: PeriodicEvaluation | None, checkpoint: CheckpointSettings
) -> Iterator[Problem]:
    """Evaluations and checkpoints are of weights that the engines have."""
    named = {"evaluation.every": None if evaluation is None else evaluation.every, "checkpoint.every": checkpoint.every}
    for field, every in named.items():
        if every is not None and every % rollout.sync_every:
            rule = f"a multiple of rollout.sync_every = {rollout.sync_every}: the engines have older weights otherwise"
            fix = f"choose a multiple of {rollout.sync_every}"
            yield Problem(field, str(every), rule, fix)


RULES = (
    engine_devices_exist,
    engines_fill_devices,
    sleeping_frees_devices,
    new_tokens_in_order,
    stops_can_be_met,
    quantized_models,
)
"""Of every stage with engines."""

RESHARDING_RULES = (transports_are_for_the_cpu, shared_memory_stays_within_a_node)
"""Of every stage that trains on rollouts."""
