"""The plan of a run, printed before it starts: placement, layouts, batch arithmetic, and the algorithm in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megarl.config import EvalConfig, PPOConfig, RAFTConfig, RewardModelConfig, RunConfig, SFTConfig, TrainingConfig
from megarl.config.schema import Algo, Choice, Optimizer, Rollout, Scores

if TYPE_CHECKING:
    from megarl.preflight.check import Sets

_FAULTS = {"too_long": "too long", "empty": "empty", "equal": "with equal responses"}


def row_texts(sets: Sets) -> Mapping[str, str]:
    """Returns, by field, how many rows of each source were read, and why some were dropped."""
    faults: dict[str, Counter[str]] = {field: Counter() for field in sets.rows}
    for field, row in sets.left_out.rows:
        faults[field][_FAULTS[row.fault]] += 1
    return {field: _text(len(used), faults[field]) for field, used in sets.rows.items()}


def epochs(steps: int, size: int, count: int) -> str:
    """Describes how often the steps of a run, of ``size`` rows each, go over ``count`` rows."""
    often = f"{steps * size / count:.3g}"
    return f"{often} epoch{'' if often == '1' else 's'} in {counted(steps, 'step')} of {size}"


def counted(count: int, noun: str, plural: str = "") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def _text(used: int, faults: Counter[str]) -> str:
    dropped = faults.total()
    if not dropped:
        return counted(used, "row")
    reasons = ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items()))
    return f"{counted(used + dropped, 'row')}, {used} used, {dropped} left out ({reasons})"


def algorithm_lines(config: PPOConfig, rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the parts of an algorithm that are on, as (key, text); ``rows`` describes sources by field."""
    algo, samples = config.algo, config.data.prompts_per_step * config.data.samples_per_prompt
    if algo.filter is not None:
        yield "filter", f"{named(algo.filter)}, of up to {counted(algo.filter_rounds, 'round')} of prompts"
    normaliser = "" if algo.normaliser is None else f", normalised by {named(algo.normaliser)}"
    yield "advantages", f"{named(algo.advantage)}{normaliser}"
    yield "penalty", _penalty(algo)
    entropy = f", entropy bonus {algo.entropy_coef:g}" if algo.entropy_coef else ""
    yield "policy loss", f"{named(algo.policy_loss)}, as {named(algo.aggregation)}{entropy}"
    if config.critic is not None:
        steps = config.critic.warmup_steps
        alone = f", alone in {counted(steps, 'step')} at first" if steps else ""
        yield "value loss", f"{named(algo.value_loss)}{alone}"
    corrections = ", ".join(_corrections(algo))
    if corrections:
        yield "corrections", corrections
    yield (
        "update",
        f"{counted(algo.ppo_epochs, 'epoch')} x {_mini_batches(algo.mini_batches)} of "
        f"{counted(samples // algo.mini_batches, 'sample')} = "
        f"{counted(algo.ppo_epochs * algo.mini_batches, 'optimizer step')}",
    )
    if algo.early_stop is not None:
        most = algo.early_stop.factor * algo.early_stop.kl
        yield "early stop", f"after an epoch that moves the policy by more than {most:g} nats per token"
    if config.ptx is not None:
        ptx = config.ptx
        yield (
            "texts",
            f"{counted(ptx.sequences_per_mini_batch, 'row')} of {ptx.data.path} ({rows['ptx.data']}) in each of these, "
            f"{ptx.mode} {ptx.coef:g}",
        )


def selection_lines(config: RAFTConfig) -> Iterator[tuple[str, str]]:
    """Yields which samples of a step RAFT trains on."""
    raft = config.raft
    only = ["that ended"] if raft.discard_unfinished else []
    if raft.min_score is not None:
        only.append(f"of a score from {raft.min_score:g} on")
    yield "selection", named(raft.strategy) + (f", of responses {' and '.join(only)}" if only else "")
    steps = counted(raft.epochs * raft.mini_batches, "optimizer step")
    yield "update", f"{counted(raft.epochs, 'epoch')} x {_mini_batches(raft.mini_batches)} = {steps}"


def shaping(scores: Scores) -> Iterator[str]:
    """Yields what is done to a score before the algorithm."""
    if scores.truncate_at is not None:
        yield f"of responses up to token {scores.truncate_at.token} from place {scores.truncate_at.after} on"
    if scores.clip is not None:
        yield f"clipped to [{scores.clip[0]:g}, {scores.clip[1]:g}]"
    if scores.missing_end is not None:
        yield f"{named(scores.missing_end)} without an end"
    if scores.placement != "last_valid":
        yield "on every token"


def named(choice: Choice) -> str:
    """Returns a choice with its options that are neither null nor false."""
    given = {key: value for key, value in choice.options.items() if value is not None and value is not False}
    options = [f"{key} {_shown(value)}" for key, value in given.items()]
    name = dict(choice)["name"]
    return f"{name} ({', '.join(options)})" if options else str(name)


def _penalty(algo: Algo) -> str:
    kl = algo.kl
    if kl.coef == 0:
        return "none"
    target = "" if kl.target is None else f", adapted to {kl.target:g} nats"
    sync, follows = kl.reference_sync, ""
    if sync is not None:
        follows = f"; the reference moves by {sync.weight:g} to the actor every {counted(sync.every, 'step')}"
    return f"KL by {named(kl.estimator)} in the {kl.placement}, coefficient {kl.coef:g}{target}{follows}"


def _corrections(algo: Algo) -> Iterator[str]:
    correction = algo.correction
    if correction.old_logprobs != "recompute":
        yield f"old log-probabilities {correction.old_logprobs}"
    if correction.weights is not None:
        yield named(correction.weights)
    yield from (f"{reject.statistic} up to {reject.upper:g}" for reject in correction.reject)
    if correction.sequence_mask is not None:
        yield f"sequence mask (delta {correction.sequence_mask.delta:g})"
    if correction.m2po is not None:
        yield f"m2po (threshold {correction.m2po.threshold:g})"


def _mini_batches(count: int) -> str:
    return counted(count, "mini-batch", "mini-batches")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "yes" if value is True else str(value)


_KEY_WIDTH = 14
_PREFERENCES = {"best_of_n": "prompts with candidates"}


def print_plan(config: RunConfig, sets: Sets, resume: str | None = None, console: Console | None = None) -> None:
    """Prints the placement of every role, and what the run does with its data.

    Args:
        resume: where the run in run.dir continues, if there is one.
    """
    out = console or Console(highlight=False)
    table = Table("role", "group", "devices", "TP", "PP", "VPP", "DP", "EP", "SP", "tokens/micro-batch", box=None)
    for row in placement_rows(config):
        table.add_row(*row)
    out.print(table)
    resumes = [] if resume is None else [("resume", resume)]
    for key, text in (*plan_lines(config, sets), *resumes):
        out.print(f"{key:{_KEY_WIDTH}}{text}", soft_wrap=True, markup=False)


def placement_rows(config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Yields a row per role, the rollout last."""
    for name, group in config.groups.items():
        for role, settings in group.roles.items():
            layout = config.layout(role)
            sizes = (str(size) for size in (layout.tp, layout.pp, layout.vpp, layout.dp, layout.ep))
            sequence = "yes" if layout.sequence_parallel else "no"
            yield (role, name, group.devices, *sizes, sequence, str(settings.tokens_per_micro_batch))
    has_engines = isinstance(config, PPOConfig | RAFTConfig | RewardModelConfig | EvalConfig)
    rollout = config.rollout if has_engines else None
    if rollout is not None:
        yield ("rollout", "", rollout.devices, str(rollout.tp), "", "", str(rollout.engines), "", "", "")


def plan_lines(config: RunConfig, sets: Sets) -> Iterator[tuple[str, str]]:
    """Yields what the run does, as (key, text)."""
    yield "model", config.model.path or f"random, seed {config.model.random and config.model.random.seed}"
    if isinstance(config, PPOConfig | RAFTConfig):
        yield from _rollouts(config, sets)
    elif isinstance(config, SFTConfig | RewardModelConfig):
        yield from _supervised(config, sets)
    elif isinstance(config, EvalConfig):
        yield from _evaluation(config, row_texts(sets))
    if not isinstance(config, TrainingConfig):
        yield "run", f"seed {config.run.seed}, into {config.run.dir}"
        return
    for role in config.trained:
        if config.has_role(role):
            yield "learning rate", f"{role}: {_course(config.optimizer(role), config.optimizer_steps(role))}"
    every, keep = config.checkpoint.every, config.checkpoint.keep
    yield "checkpoints", "after the last step" if every is None else f"{_every(every)}, {keep} kept"
    yield "run", f"{counted(config.run.steps, 'step')}, seed {config.run.seed}, into {config.run.dir}"


def _rollouts(config: PPOConfig | RAFTConfig, sets: Sets) -> Iterator[tuple[str, str]]:
    data, rows = config.data, row_texts(sets)
    samples = counted(data.prompts_per_step * data.samples_per_prompt, "sample")
    count = len(sets.rows["data.prompts"])
    source = f"{count} random ones" if data.prompts is None else f"{data.prompts.path}: {rows['data.prompts']}"
    least = "at least " if isinstance(config, PPOConfig) and config.algo.filter is not None else ""
    yield "prompts", f"{source}; {least}{epochs(config.run.steps, data.prompts_per_step, count)}"
    yield "step", f"{counted(data.prompts_per_step, 'prompt')} x {data.samples_per_prompt} = {samples}"
    yield "lengths", _lengths(config.rollout)
    shaped = shaping(config.algo.scores if isinstance(config, PPOConfig) else config.scores)
    shuffled = ["shuffled"] if config.reward.shuffle else []
    yield "scores", ", ".join([" + ".join(_scores(config)), *shaped, *shuffled])
    yield from algorithm_lines(config, rows) if isinstance(config, PPOConfig) else selection_lines(config)
    if config.rollout.sync_every > 1:
        yield "weights", f"into the engines {_every(config.rollout.sync_every)}"
    if config.actor.ema is not None:
        yield "average", f"of the actor, decay {config.actor.ema.decay:g}"
    if config.evaluation is not None:
        told = f"{config.evaluation.prompts.path}: {rows['evaluation.prompts']}"
        yield "evaluation", f"{told}; {_when(config.evaluation.every)}"


def _evaluation(config: EvalConfig, rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    evaluation = config.evaluation
    how = "the likeliest" if evaluation.greedy else f"{evaluation.samples_per_prompt} sampled"
    yield "prompts", f"{evaluation.prompts.path}: {rows['evaluation.prompts']}; {how} for each"
    yield "lengths", _lengths(config.rollout)
    model = [config.reward.path or "a random reward model"] if config.has_role("reward") else []
    passes = f"; pass@k for k in {list(evaluation.pass_at)}" if evaluation.pass_at else ""
    yield "scores", ", ".join([*model, *(function.name for function in evaluation.functions)]) + passes


def _supervised(config: SFTConfig | RewardModelConfig, sets: Sets) -> Iterator[tuple[str, str]]:
    data, told = config.data, row_texts(sets)
    size = config.data.sequences_per_step if isinstance(config, SFTConfig) else config.data.pairs_per_step
    often = epochs(config.run.steps, size, len(sets.rows["data.train"]))
    yield "data", f"{data.train.path}: {told['data.train']}; {often}"
    if isinstance(config, SFTConfig):
        yield "step", f"{counted(size, 'sequence')} of up to {data.max_tokens} tokens"
        yield "loss", {"response": "on the responses", "all": "on all tokens"}[config.data.loss_on]
    else:
        rows = f"{size} {_PREFERENCES.get(config.reward.loss.name, 'pairs')}"
        yield "step", f"{rows}, each response with its prompt up to {data.max_tokens} tokens"
        yield "loss", named(config.reward.loss)
    if data.evaluation is not None:
        yield "evaluation", f"{data.evaluation.path}: {told['data.evaluation']}; {_when(data.evaluate_every)}"
    if isinstance(config, RewardModelConfig) and config.normalisation is not None and config.rollout is not None:
        normalisation = config.normalisation
        source = f"{normalisation.prompts.path}: {told['normalisation.prompts']}"
        yield "normalisation", f"{normalisation.samples} answers to prompts of {source}"
        yield "lengths", _lengths(config.rollout)


def _lengths(rollout: Rollout) -> str:
    return f"up to {rollout.max_new_tokens} new tokens, {rollout.max_model_len} with the prompt"


def _scores(config: PPOConfig | RAFTConfig) -> Iterator[str]:
    reward = config.reward
    if config.has_role("reward"):
        dense = f" after every token ({reward.dense})" if reward.dense else ""
        yield f"{reward.weight:g} x {reward.path or 'a random reward model'}{dense}"
    for function in reward.functions:
        yield f"{function.weight:g} x {function.name}"


def _course(optimizer: Optimizer, steps: int) -> str:
    rise = f"rising over the first {optimizer.warmup:.0%}, then " if optimizer.warmup else ""
    ends = {"constant": "constant", "anneal": "annealed to 0 by the steps of the run"}
    end = ends.get(optimizer.schedule) or f"{optimizer.schedule} to {optimizer.final_lr:g}"
    return f"{optimizer.lr:g} in {counted(steps, 'optimizer step')}, {rise}{end}"


def _when(every: int | None) -> str:
    return "before the first step and after the last" if every is None else _every(every)


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"
