"""Rules of engines, of generation, and of the transfer of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config.problems import Broken, Problem, correct_path, ineffective_settings, shown
from megarl.config.rules.model_rules import ids_in_use, readable_config, unreadable_config
from megarl.config.rules.placement_rules import tp_fills_devices
from megarl.config.schema import (
    Algo,
    CheckpointSettings,
    Cluster,
    Groups,
    Model,
    PeriodicEvaluation,
    PromptData,
    Resharding,
    Reward,
    Rollout,
    trains_on_rollouts,
)
from megarl.config.schema.base import parse_devices
from megarl.config.schema.cluster_sections import shared_devices


def engines_fill_devices(cluster: Cluster, rollout: Rollout) -> Iterator[Broken]:
    """The engines' tp divides the number of their devices, and no engine spans nodes."""
    yield from tp_fills_devices("rollout", rollout.devices, rollout.tp, cluster.devices_per_node)


def sleeping_frees_devices(groups: Groups, rollout: Rollout) -> Iterator[Broken]:
    """Engines sleep only where a group uses their devices."""
    if rollout.sleep and not shared_devices(groups, rollout):
        rule = "has an effect where a group has devices of the engines"
        yield "rollout.sleep", rule, "set it to false"


def separate_adapters_are_on_weights_as_they_are(
    resharding: Resharding,
    rollout: Rollout,
) -> Iterator[Broken]:
    """Engines apply adapters to weights that are not quantized."""
    if resharding.adapters == "separate" and rollout.quantization is not None:
        rule = "null with resharding.adapters = separate, which are not supported on quantized weights"
        yield "rollout.quantization", rule, "set it to null, or resharding.adapters to merged"


def end_tokens_are_sampled(algo: Algo, rollout: Rollout) -> Iterator[Broken]:
    """Trainers do not know where a response may not end. The likelihood of samples is of all tokens."""
    if rollout.min_new_tokens and not algo.is_likelihood:
        loss = f"with policy loss {algo.policy_loss.name}"
        rule = f"0 {loss}: the trainers' log-probabilities, so the ratios, are of end tokens too"
        yield "rollout.min_new_tokens", rule, "remove it; rollout.ignore_eos gives all responses one length"


def kept_tokens_need_a_bound(algo: Algo | None, rollout: Rollout) -> Iterator[Broken]:
    """Trainers normalize over the tokens that top-p or min-p leave."""
    if not rollout.truncates or algo is None or algo.is_likelihood:
        where = "where nothing is trained on ratios of a part of the tokens"
        otherwise = "or set rollout.top_p or min_p in stage ppo"
    elif rollout.top_k is not None:
        where = "with rollout.top_k, which bounds the tokens itself"
        otherwise = "or set rollout.top_k to null"
    else:
        return
    yield from ineffective_settings("rollout", rollout, ("kept_max",), where, otherwise)


def drafts_are_checked(rollout: Rollout) -> Iterator[Broken]:
    """vLLM (0.32) checks drafts by temperature, top-p and top-k.

    A token after accepted drafts would be kept from ending a response by the length before them.
    """
    for name in ("min_p", "min_new_tokens"):
        if rollout.speculative and getattr(rollout, name) > 0:
            rule = f"0 with rollout.{name}, by which vLLM does not check drafts correctly"
            yield "rollout.speculative", rule, "set it to 0"


def draft_models_stay(cluster: Cluster, rollout: Rollout) -> Iterator[Broken]:
    """A draft model has a readable config.json, drafts tokens, and keeps its weights."""
    if rollout.draft_model is None:
        return
    yield from unreadable_config("rollout.draft_model", rollout.draft_model)
    if rollout.speculative == 0:
        rule = "has no effect with rollout.speculative = 0"
        yield "rollout.draft_model", rule, "set it to null, or raise rollout.speculative"
    if rollout.sleep and cluster.device == "cuda":
        rule = "null with rollout.sleep, which drops its weights"
        yield "rollout.draft_model", rule, "set it to null, or give the engines devices of their own"


def divergences_are_of_all_tokens(algo: Algo, rollout: Rollout) -> Iterator[Broken]:
    """A divergence of whole distributions is none of what a part of the tokens was sampled from."""
    if algo.kl.reads_distributions:
        for name in ("top_p", "top_k", "min_p"):
            default = Rollout.model_fields[name].default
            if getattr(rollout, name) != default:
                rule = f"{shown(default)} with algo.kl.estimator = full, which compares all tokens"
                yield f"rollout.{name}", rule, "remove it, or set algo.kl.estimator to k3"


def stops_can_be_met(model: Model, rollout: Rollout) -> Iterator[Broken]:
    """Stop texts are not empty; stop ids may be sampled."""
    if "" in rollout.stop:
        yield "rollout.stop", "must hold no empty text, which is everywhere", "remove it"
    used = ids_in_use(model)
    beyond = [token for token in rollout.stop_token_ids if used is not None and token >= used]
    if beyond:
        rule = f"below {used}, the number of ids in use: others are never sampled"
        yield Problem("rollout.stop_token_ids", shown(beyond), rule, "remove them")


def quantized_models(cluster: Cluster, model: Model, rollout: Rollout) -> Iterator[Broken]:
    """vLLM (0.28 to 0.32) quantizes 16-bit weights, and no experts on a CPU."""
    hf = readable_config(model)
    if rollout.quantization is None or hf is None:
        return
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32")
    if dtype not in ("bfloat16", "float16"):
        rule = f"the model must be of bfloat16 or float16; it is of {dtype}"
        yield "rollout.quantization", rule, "set it to null"
    experts = hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts")
    if experts and cluster.device == "cpu":
        yield "rollout.quantization", "vLLM cannot quantize experts on a CPU", "set it to null"


def replayed_rollouts_exist(stage: str, rollout: Rollout) -> Iterator[Broken]:
    """Rollouts to replay are in a directory."""
    if not trains_on_rollouts(stage) or rollout.replay is None:
        return
    if not Path(rollout.replay).is_dir():
        fix = f"{correct_path(rollout.replay)}, or make it with rollout.record"
        yield "rollout.replay", "a directory that exists", fix


def transports_are_for_the_cpu(cluster: Cluster, resharding: Resharding) -> Iterator[Broken]:
    """Gloo and shared memory move weights between CPUs."""
    if resharding.transport not in ("auto", "gloo", "shared_memory") and ":" not in resharding.transport:
        rule = "auto, gloo, shared_memory, or a class, written as package.module:Class"
        yield "resharding.transport", rule, "set it to auto"
    elif cluster.device != "cpu" and resharding.transport in ("gloo", "shared_memory"):
        rule = f"auto where cluster.device is {cluster.device}"
        yield "resharding.transport", rule, "set it to auto"


def shared_memory_stays_within_a_node(
    cluster: Cluster, groups: Groups, rollout: Rollout, resharding: Resharding
) -> Iterator[Broken]:
    """The actor and all engines are on one node if they share memory."""
    if resharding.transport != "shared_memory":
        return
    devices = set(parse_devices(rollout.devices))
    for group in groups.values():
        if "actor" in group.roles:
            devices.update(parse_devices(group.devices))
    nodes = {device // cluster.devices_per_node for device in devices}
    if len(nodes) > 1:
        rule = f"within a node; actor and engines are on nodes {', '.join(map(str, sorted(nodes)))}"
        fix = "set it to auto, which shares memory where it can, or to gloo"
        yield "resharding.transport", rule, fix


def updates_roll_over_engines(stage: str, rollout: Rollout) -> Iterator[Broken]:
    """Several engines are needed to update some at a time."""
    if trains_on_rollouts(stage) and rollout.mode != "exact" and rollout.engines == 1:
        otherwise = "or give rollout.devices more of them"
        yield from ineffective_settings("rollout", rollout, ("rolling_update",), "with one engine", otherwise)


def evaluations_in_the_background(groups: Groups, rollout: Rollout, evaluation: PeriodicEvaluation) -> Iterator[Broken]:
    """An evaluation during the training needs engines that work meanwhile."""
    if not evaluation.blocking and shared_devices(groups, rollout):
        fix = "set it to true, or give the engines devices of their own"
        yield "evaluation.blocking", "true where a group has devices of the engines", fix


def engines_that_need_devices_of_their_own(stage: str, groups: Groups, rollout: Rollout) -> Iterator[Broken]:
    """Engines that work or are replaced during the training share no devices with it."""
    shared = shared_devices(groups, rollout)
    if not trains_on_rollouts(stage) or not shared:
        return
    others = f"devices of no group; a group has {', '.join(map(str, shared))} too"
    if rollout.mode != "exact":
        fix = "give the engines devices of their own, or set rollout.mode to exact, which takes turns"
        yield "rollout.devices", f"{others}, with rollout.mode = {rollout.mode}", fix
    if rollout.max_replacements:
        fix = "set it to 0, or give the engines devices of their own"
        yield "rollout.max_replacements", "0 where a group has devices of the engines", fix
    if rollout.inference_parts > 1:
        rule = "1 where a group has devices of the engines: nothing else can run while they generate"
        fix = "set it to 1, or give the engines devices of their own"
        yield "rollout.inference_parts", rule, fix


def parts_have_samples(rollout: Rollout, data: PromptData, reward: Reward) -> Iterator[Broken]:
    """Every part of a step has a sample, and no function scores the samples of several parts together."""
    samples = data.samples_per_step
    units = [function.unit for function in reward.functions]
    if rollout.inference_parts > 1 and "group" in units:
        rule = "1 where a function scores all responses to a prompt together: they may be in several parts"
        yield "rollout.inference_parts", rule, "set it to 1"
    if rollout.inference_parts > samples:
        fix = f"set it to {samples} or less"
        yield "rollout.inference_parts", f"at most {samples}, the samples of a step", fix


def syncs_meet(
    stage: str, rollout: Rollout, evaluation: PeriodicEvaluation | None, checkpoint: CheckpointSettings
) -> Iterator[Broken]:
    """Evaluations and checkpoints follow a sync."""
    if not trains_on_rollouts(stage):
        return
    for name, section in {"evaluation": evaluation, "checkpoint": checkpoint}.items():
        if section is None or section.every is None:
            continue
        if section.every % rollout.sync_every:
            rule = f"a multiple of rollout.sync_every = {rollout.sync_every}: the engines have older weights otherwise"
            yield f"{name}.every", rule, f"choose a multiple of {rollout.sync_every}"
