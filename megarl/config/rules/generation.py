"""Where the engines are, and what they may be asked for. Without engines every rule holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.devices import parse_devices
from megarl.config.problems import Problem, correct_path, shown
from megarl.config.rules.model import known
from megarl.config.rules.placement import beyond_the_cluster
from megarl.config.rules.unused import unused
from megarl.config.schema import Cluster, Evaluation, Group, Model, PromptData, Rollout, Tracking

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
            field="rollout.tp",
            value=str(rollout.tp),
            rule=f"divides the {len(devices)} rollout devices ({rollout.devices})",
            fix=f"choose a divisor of {len(devices)}, or change rollout.devices",
        )
        return
    for first in range(0, len(devices), rollout.tp):
        engine = devices[first : first + rollout.tp]
        if len({device // cluster.devices_per_node for device in engine}) > 1:
            yield Problem(
                field="rollout.devices",
                value=rollout.devices,
                rule=f"an engine stays within a node; one would have devices {', '.join(map(str, engine))}",
                fix=f"list {rollout.tp} devices of one node for each engine",
            )


def sleeping_frees_devices(groups: Groups, rollout: Rollout | None) -> Iterator[Problem]:
    """An engine that sleeps makes room for a group."""
    if rollout is None or not rollout.sleep:
        return
    trainers = {device for group in groups.values() for device in parse_devices(group.devices)}
    if not trainers & set(parse_devices(rollout.devices)):
        rule = "has an effect where a group has devices of the engines"
        yield Problem(field="rollout.sleep", value="True", rule=rule, fix="set it to false")


def new_tokens_in_order(rollout: Rollout | None) -> Iterator[Problem]:
    """A response has room for its least number of tokens."""
    if rollout is not None and rollout.min_new_tokens > rollout.max_new_tokens:
        yield Problem(
            field="rollout.min_new_tokens",
            value=str(rollout.min_new_tokens),
            rule=f"at most rollout.max_new_tokens = {rollout.max_new_tokens}",
            fix="lower it, or raise rollout.max_new_tokens",
        )


def stops_can_be_met(model: Model, rollout: Rollout | None) -> Iterator[Problem]:
    """Texts that end a response are read by a tokenizer; neither they nor the token ids may be void."""
    if rollout is None:
        return
    if rollout.stop and model.tokenizer is None and model.path is None:
        fix = "set model.tokenizer, or use rollout.stop_token_ids"
        yield Problem(field="rollout.stop", value=shown(rollout.stop), rule="needs a tokenizer", fix=fix)
    if "" in rollout.stop:
        fix = "remove it"
        yield Problem(field="rollout.stop", value=shown(rollout.stop), rule="an empty text is everywhere", fix=fix)
    hf = known(model) or {}
    used = model.vocab_size or hf.get("vocab_size")
    beyond = [token for token in rollout.stop_token_ids if isinstance(used, int) and token >= used]
    if beyond:
        rule = f"below {used}, the number of ids in use: others are never sampled"
        yield Problem(field="rollout.stop_token_ids", value=shown(beyond), rule=rule, fix="remove them")


def quantized_models(cluster: Cluster, model: Model, rollout: Rollout | None) -> Iterator[Problem]:
    """vLLM quantizes 16-bit weights as they arrive; its experts have no such kernel on a CPU (0.28 to 0.32)."""
    hf = known(model)
    if rollout is None or rollout.quantization is None or hf is None:
        return
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32")
    if dtype not in ("bfloat16", "float16"):
        rule = f"the model is of bfloat16 or float16; it is of {dtype}"
        yield Problem(field="rollout.quantization", value=rollout.quantization, rule=rule, fix="set it to null")
    experts = hf.get("num_experts") or hf.get("num_local_experts")
    if experts and cluster.device == "cpu":
        rule = "vLLM cannot quantize experts on a CPU"
        yield Problem(field="rollout.quantization", value=rollout.quantization, rule=rule, fix="set it to null")


def record_or_replay(rollout: Rollout) -> Iterator[Problem]:
    """Rollouts that are read back are not written again, and must exist."""
    if rollout.replay is None:
        return
    if rollout.record is not None:
        fix = "set one of them to null"
        yield Problem(field="rollout.record", value=rollout.record, rule="not together with rollout.replay", fix=fix)
    if not Path(rollout.replay).is_dir():
        fix = f"{correct_path(rollout.replay)}, or make it with rollout.record"
        yield Problem(field="rollout.replay", value=rollout.replay, rule="a directory that exists", fix=fix)


def samples_differ(rollout: Rollout, data: PromptData | None, evaluation: Evaluation | None) -> Iterator[Problem]:
    """Who takes the likeliest token each time answers a prompt once: the other answers would be the same."""
    named = {
        "data.samples_per_prompt": 1 if data is None else data.samples_per_prompt,
        "evaluation.samples_per_prompt": 1 if evaluation is None else evaluation.samples_per_prompt,
    }
    for field, samples in named.items():
        if rollout.top_k == 1 and samples > 1:
            rule, fix = "1 with rollout.top_k = 1: the answers to a prompt would all be the same", "set it to 1"
            yield Problem(field=field, value=str(samples), rule=rule, fix=f"{fix}, or rollout.top_k to null")


def nothing_to_record(rollout: Rollout | None) -> Iterator[Problem]:
    """Reference samples and evaluations are neither recorded nor replayed; their weights do not change."""
    if rollout is not None:
        names = ("record", "replay", "sync_every")
        yield from unused("rollout", rollout, names, "in a stage that does not train on rollouts", "or use stage ppo")


def nothing_to_show(tracking: Tracking) -> Iterator[Problem]:
    """Only rollouts are samples to read."""
    where = "in a stage without rollouts of the model in training"
    yield from unused("tracking", tracking, ("samples",), where, "or use stage ppo")


RULES = (
    engine_devices_exist,
    engines_fill_devices,
    sleeping_frees_devices,
    new_tokens_in_order,
    stops_can_be_met,
    quantized_models,
)
"""Of every stage with engines."""
