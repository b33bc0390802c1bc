"""The plan of a run, printed before it starts: placement, layouts, batch arithmetic, and the algorithm."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megarl.cluster.cpu_threads import with_threads
from megarl.config import EvalConfig, PPOConfig, RewardModelConfig, RunConfig, SamplingConfig, SFTConfig, TrainingConfig
from megarl.config.schema import (
    Algo,
    CheckpointSettings,
    Choice,
    Cluster,
    Optimizer,
    Rollout,
    Scores,
    Selection,
    Threads,
)
from megarl.models import model_spec
from megarl.models.transformer_engine import refusals
from megarl.preflight.models import without_weights
from megarl.run.display import counted
from megarl.run.resume import resumed_config

if TYPE_CHECKING:
    from megarl.preflight.datasets import Sets

_KEY_WIDTH = 14
_SHOWN = 300
"""Characters of the first prompt's start and end; a shorter one is shown whole."""
_FAULTS = {"too_long": "too long", "empty": "empty", "equal": "with equal responses"}


def print_plan(
    config: RunConfig,
    sets: Sets,
    resume: str | None = None,
    console: Console | None = None,
    first_prompt: Sequence[int] = (),
) -> None:
    """Prints the placement of the roles, and the plan's lines.

    Args:
        resume: where the run in run.dir continues.
        first_prompt: of the environment; else it is the first row's.
    """
    out = console or Console(highlight=False)
    table = Table("role", "group", "devices", "TP", "PP", "VPP", "DP", "EP", "SP", "tokens/micro-batch", box=None)
    for row in _placement_rows(config):
        table.add_row(*row)
    out.print(table)
    resumes = [] if resume is None else [("resume", resume)]
    for key, text in (*plan_lines(config, sets, first_prompt), *resumes):
        out.print(f"{key:{_KEY_WIDTH}}{text}", soft_wrap=True, markup=False)


def _placement_rows(config: RunConfig) -> Iterator[tuple[str, ...]]:
    for name, group in config.groups.items():
        for role, settings in group.roles.items():
            layout = config.layout(role)
            sizes = (str(size) for size in (layout.tp, layout.pp, layout.vpp, layout.dp, layout.ep))
            sequence = "yes" if layout.sequence_parallel else "no"
            yield (role, name, group.devices, *sizes, sequence, str(settings.tokens_per_micro_batch))
    rollout = config.engine_settings
    if rollout is not None:
        yield ("rollout", "", rollout.devices, str(rollout.tp), "", "", str(rollout.engines), "", "", "")
    judge = config.judge_model
    if judge is not None:
        yield ("judge", "", judge.devices, str(judge.tp), "", "", str(judge.rollout.engines), "", "", "")


def plan_lines(config: RunConfig, sets: Sets, first_prompt: Sequence[int] = ()) -> Iterator[tuple[str, str]]:
    """Yields the work of a run as (key, text)."""
    rows = _row_texts(sets)
    yield "devices", _devices(with_threads(config, resumed_config(config)).cluster)
    yield "model", config.model.path or f"random, seed {config.model.random and config.model.random.seed}"
    if config.cluster.device == "cuda":
        yield "layers", _layers(config)
    for field, path in without_weights(config).items():
        yield "not checked", f"the weights of {field}: {path} has a config.json, and none yet"
    if isinstance(config, PPOConfig):
        yield from _rollouts(config, rows, len(sets.rows["data.prompts"]))
    elif isinstance(config, SFTConfig | RewardModelConfig):
        yield from _supervised(config, rows, len(sets.rows["data.train"]))
    elif isinstance(config, EvalConfig):
        yield from _evaluation(config, rows)
    if isinstance(config, SamplingConfig) and config.environment is not None:
        environment = config.environment
        turns = f"up to {counted(environment.max_turns, 'turn')} of up to {config.rollout.max_new_tokens} tokens"
        yield "environment", f"{environment.name}, {turns}, {config.rollout.max_model_len} in all"
    if (first := _first_prompt(sets, first_prompt)) is not None:
        yield "first prompt", first
    if not isinstance(config, TrainingConfig):
        yield "run", f"seed {config.run.seed}, into {config.run.dir}"
        return
    for role in config.trained:
        if config.has_role(role):
            yield "learning rate", f"{role}: {_schedule(config.optimizer(role), config.optimizer_steps(role))}"
    yield "checkpoints", _checkpoints(config.checkpoint)
    yield "run", f"{counted(config.steps, 'step')}, seed {config.run.seed}, into {config.run.dir}"


def _layers(config: RunConfig) -> str:
    """Returns which layers the run's model has on a GPU that Transformer Engine supports."""
    spec = model_spec(config.model.hf_config())
    reasons = refusals(spec.dims, spec.dtype)
    if config.model.layers == "local" or reasons:
        return "; ".join(["Megatron's own", *(reasons if config.model.layers != "local" else [])])
    return f"Transformer Engine's{', where it is installed' if config.model.layers == 'auto' else ''}"


def _checkpoints(settings: CheckpointSettings) -> str:
    if settings.every is None:
        return "after the last step"
    kept = [f"{settings.keep} kept"]
    kept += [] if settings.keep_every is None else [f"those of every {settings.keep_every} steps"]
    kept += [] if settings.best is None else [f"that with the {settings.best.mode} of {settings.best.metric}"]
    written = "; written while the training goes on" if settings.async_save else ""
    return f"{_every(settings.every)}, {', and '.join(kept)}{written}"


def _devices(cluster: Cluster) -> str:
    kind = "GPU" if cluster.device == "cuda" else "virtual device"
    nodes = f" on each of {counted(cluster.nodes, 'node')}" if cluster.nodes > 1 else ""
    unseen = "" if cluster.is_here else ", as configured: the cluster was not looked at"
    threads = cluster.threads_per_device
    each = f"; threads: {threads.trainers} of each trainer rank, {threads.engines} of each engine rank"
    of_cpu = f" of the CPU{each if threads != Threads() else ''}" if cluster.device == "cpu" else ""
    return f"{counted(cluster.devices_per_node, kind)}{of_cpu}{nodes}{unseen}"


def _first_prompt(sets: Sets, given: Sequence[int]) -> str | None:
    """Returns the first prompt as the model sees it, in quotes, with its special tokens; None without a tokenizer."""
    rows = next((rows for rows in sets.rows.values() if rows), None)
    if sets.tokenizer is None or not rows:
        return None
    row: Any = rows[0]
    ids = given or (row.token_ids if hasattr(row, "token_ids") else row.prompt_ids.tolist())
    text = sets.tokenizer.decode(ids, special=True)
    middle = f" ... {len(text) - 2 * _SHOWN} characters ... "
    cut = text if len(text) <= 3 * _SHOWN else f"{text[:_SHOWN]}{middle}{text[-_SHOWN:]}"
    return f"{counted(len(ids), 'token')}: {json.dumps(cut, ensure_ascii=False)}"


def _row_texts(sets: Sets) -> Mapping[str, str]:
    """Returns, by field, how many rows of each source were read, and why some were dropped."""
    faults: dict[str, Counter[str]] = {field: Counter() for field in sets.rows}
    for field, row in sets.left_out.rows:
        faults[field][_FAULTS[row.fault]] += 1
    return {field: _row_text(len(used), faults[field]) for field, used in sets.rows.items()}


def _row_text(used: int, faults: Counter[str]) -> str:
    dropped = faults.total()
    if not dropped:
        return counted(used, "row")
    reasons = ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items()))
    return f"{counted(used + dropped, 'row')}, {used} used, {dropped} left out ({reasons})"


def _rollouts(config: PPOConfig, rows: Mapping[str, str], count: int) -> Iterator[tuple[str, str]]:
    data = config.data
    samples = counted(data.prompts_per_step * data.samples_per_prompt, "sample")
    made = f"{count} {'random ones' if data.tasks is None else 'tasks of the environment'}"
    source = made if data.prompts is None else f"{data.prompts.path}: {rows['data.prompts']}"
    least = "" if config.algo.filter is None else "at least "
    yield "prompts", f"{source}; {least}{_epochs(config.steps, data.prompts_per_step, count)}"
    yield "step", f"{counted(data.prompts_per_step, 'prompt')} x {data.samples_per_prompt} = {samples}"
    yield "lengths", _lengths(config.rollout)
    shaping = _shaping(config.algo.scores)
    shuffled = ["shuffled"] if config.reward.shuffle else []
    yield "scores", ", ".join([" + ".join(_sources(config)), *shaping, *shuffled])
    yield from _algorithm(config, rows)
    if config.rollout.sync_every > 1:
        yield "weights", f"into the engines {_every(config.rollout.sync_every)}"
    if config.actor.ema is not None:
        yield "average", f"of the actor, decay {config.actor.ema.decay:g}"
    if config.evaluation is not None:
        prompts = f"{config.evaluation.source}: {rows['evaluation.prompts']}"
        yield "evaluation", f"{prompts}; {_when(config.evaluation.every)}"


def _sources(config: PPOConfig) -> Iterator[str]:
    reward = config.reward
    if config.has_role("reward"):
        dense = f" after every token ({reward.dense})" if reward.dense else ""
        yield f"{reward.weight:g} x {reward.path or 'a random reward model'}{dense}"
    if config.environment is not None:
        yield f"{config.environment.weight:g} x environment"
    for function in reward.functions:
        yield f"{function.weight:g} x {function.name}"


def _shaping(scores: Scores) -> Iterator[str]:
    if scores.truncate_at is not None:
        yield f"of responses up to token {scores.truncate_at.token} from place {scores.truncate_at.after} on"
    if scores.clip is not None:
        yield f"clipped to [{scores.clip[0]:g}, {scores.clip[1]:g}]"
    if scores.missing_end is not None:
        yield f"{_named(scores.missing_end)} without an end"
    if scores.placement != "last_valid":
        yield "on every token"


def _algorithm(config: PPOConfig, rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the parts of an algorithm that are on."""
    algo, samples = config.algo, config.data.prompts_per_step * config.data.samples_per_prompt
    if algo.filter is not None:
        yield "filter", f"{_named(algo.filter)}, of up to {counted(algo.filter_rounds, 'round')} of prompts"
    if algo.select is not None:
        yield "selection", _selection(algo.select)
    normaliser = "" if algo.normaliser is None else f", normalised by {_named(algo.normaliser)}"
    yield "advantages", f"{_named(algo.advantage)}{normaliser}"
    yield "penalty", _penalty(algo)
    entropy = f", entropy bonus {algo.entropy_coef:g}" if algo.entropy_coef else ""
    yield "policy loss", f"{_named(algo.policy_loss)}, as {_named(algo.aggregation)}{entropy}"
    if config.critic is not None:
        steps = config.critic.warmup_steps
        alone = f", alone in {counted(steps, 'step')} at first" if steps else ""
        yield "value loss", f"{_named(algo.value_loss)}{alone}"
    corrections = ", ".join(_corrections(algo))
    if corrections:
        yield "corrections", corrections
    mini_batches, of = counted(algo.mini_batches, "mini-batch"), counted(samples // algo.mini_batches, "sample")
    if algo.has_logprob_pass or algo.old_logprobs_from_update:
        yield "old logprobs", _old_logprobs(config)
    steps = counted(algo.ppo_epochs * algo.mini_batches, "optimizer step")
    each = f"{mini_batches} of {of}" if algo.select is None else f"up to {mini_batches} of the selected samples"
    yield "update", f"{counted(algo.ppo_epochs, 'epoch')} x {each} = {steps}"
    if algo.early_stop is not None:
        most = algo.early_stop.factor * algo.early_stop.kl
        yield "early stop", f"after an epoch that moves the policy by more than {most:g} nats per token"
    ptx = config.ptx
    if ptx is not None:
        texts = f"{counted(ptx.sequences_per_mini_batch, 'row')} of {ptx.data.path} ({rows['ptx.data']})"
        yield "texts", f"{texts} in each of these, {ptx.mode} {ptx.coef:g}"


def _penalty(algo: Algo) -> str:
    kl = algo.kl
    if kl.coef == 0:
        return "none"
    target = "" if kl.target is None else f", adapted to {kl.target:g} nats"
    sync, follows = kl.reference_sync, ""
    if sync is not None:
        follows = f"; the reference moves by {sync.weight:g} to the actor every {counted(sync.every, 'step')}"
    return f"KL by {_named(kl.estimator)} in the {kl.placement}, coefficient {kl.coef:g}{target}{follows}"


def _corrections(algo: Algo) -> Iterator[str]:
    correction = algo.correction
    if correction.old_logprobs != "recompute":
        yield f"old log-probabilities {correction.old_logprobs}"
    if correction.weights is not None:
        yield _named(correction.weights)
    yield from (f"{reject.statistic} up to {reject.upper:g}" for reject in correction.reject)
    if correction.sequence_mask is not None:
        yield f"sequence mask (delta {correction.sequence_mask.delta:g})"
    if correction.m2po is not None:
        yield f"m2po (threshold {correction.m2po.threshold:g})"


_READERS = {
    "algo.ppo_epochs": "later epochs compare with them",
    "algo.mini_batches": "later mini-batches compare with them",
    "algo.kl": "the penalty is in the reward",
    "algo.correction.weights": "the weights of the step",
    "algo.correction.reject": "the tokens that are dropped",
    "algo.correction.m2po": "the tokens that are dropped",
}
"""What reads the trainer's log-probabilities before the update, by setting."""


def _old_logprobs(config: PPOConfig) -> str:
    readers = [f"{setting} ({_READERS[setting]})" for setting in config.algo.reads_old_logprobs]
    if readers:
        return f"by a forward pass before the update, for {', '.join(readers)}"
    steps = 0 if config.critic is None else config.critic.warmup_steps
    alone = f"; in the critic's {counted(steps, 'step')} alone by a pass" if steps else ""
    return f"those of the update, as a step is one optimizer step; no pass before it{alone}"


def _selection(selection: Selection) -> str:
    """Returns which samples of a step are trained on."""
    only: list[str] = []
    if selection.discard_unfinished:
        only.append("that ended")
    if selection.min_score is not None:
        only.append(f"with a score of at least {selection.min_score:g}")
    limits = f", of responses {' and '.join(only)}" if only else ""
    return f"{_named(selection.by)}{limits}"


def _supervised(
    config: SFTConfig | RewardModelConfig, rows: Mapping[str, str], count: int
) -> Iterator[tuple[str, str]]:
    data = config.data
    size = config.data.sequences_per_step if isinstance(config, SFTConfig) else config.data.pairs_per_step
    yield "data", f"{data.train.path}: {rows['data.train']}; {_epochs(config.steps, size, count)}"
    if isinstance(config, SFTConfig):
        yield "step", f"{counted(size, 'sequence')} of up to {data.max_tokens} tokens"
        yield "loss", {"response": "on the responses", "all": "on all tokens"}[config.data.loss_on]
    else:
        of = "prompts with candidates" if config.reward.loss.name == "best_of_n" else "pairs"
        yield "step", f"{size} {of}, each response with its prompt up to {data.max_tokens} tokens"
        yield "loss", _named(config.reward.loss)
    if data.evaluation is not None:
        yield "evaluation", f"{data.evaluation.path}: {rows['data.evaluation']}; {_when(data.evaluate_every)}"
    if isinstance(config, RewardModelConfig) and config.normalisation is not None and config.rollout is not None:
        normalisation = config.normalisation
        source = f"{normalisation.prompts.path}: {rows['normalisation.prompts']}"
        yield "normalisation", f"{normalisation.samples} answers to prompts of {source}"
        yield "lengths", _lengths(config.rollout)


def _evaluation(config: EvalConfig, rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    evaluation = config.evaluation
    how = "the likeliest" if evaluation.greedy else f"{evaluation.samples_per_prompt} sampled"
    yield "prompts", f"{evaluation.source}: {rows['evaluation.prompts']}; {how} for each"
    yield "lengths", _lengths(config.rollout)
    model = [config.reward.path or "a random reward model"] if config.has_role("reward") else []
    passes = f"; pass@k for k in {list(evaluation.pass_at)}" if evaluation.pass_at else ""
    model += ["environment"] if config.environment is not None else []
    yield "scores", ", ".join([*model, *(function.name for function in evaluation.functions)]) + passes


def _lengths(rollout: Rollout) -> str:
    return f"up to {rollout.max_new_tokens} new tokens, {rollout.max_model_len} with the prompt"


def _schedule(optimizer: Optimizer, steps: int) -> str:
    rise = f"rising over the first {optimizer.warmup:.0%}, then " if optimizer.warmup else ""
    ends = {"constant": "constant", "anneal": "annealed to 0 by the steps of the run"}
    end = ends.get(optimizer.schedule) or f"{optimizer.schedule} to {optimizer.final_lr:g}"
    return f"{optimizer.lr:g} in {counted(steps, 'optimizer step')}, {rise}{end}"


def _epochs(steps: int, size: int, count: int) -> str:
    """Describes how often the steps of a run, of ``size`` rows each, go over ``count`` rows."""
    epochs = f"{steps * size / count:.3g}"
    return f"{epochs} epoch{'' if epochs == '1' else 's'} in {counted(steps, 'step')} of {size}"


def _when(every: int | None) -> str:
    return "before the first step and after the last" if every is None else _every(every)


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def _named(choice: Choice) -> str:
    """Describes a choice with its options that are neither null nor false."""
    given = {key: value for key, value in choice.options.items() if value is not None and value is not False}
    options = [f"{key} {_shown(value)}" for key, value in given.items()]
    name = dict(choice)["name"]
    return f"{name} ({', '.join(options)})" if options else str(name)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "yes" if value is True else str(value)
