"""What a configuration would run, printed before anything runs: placement, layouts, and the arithmetic of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megarl.config import EvalConfig, PPOConfig, RAFTConfig, RewardModelConfig, RunConfig, SFTConfig, TrainingConfig
from megarl.config.schema import Optimizer, Rollout
from megarl.plan.algorithm import algorithm_lines, named, selection_lines, shaping
from megarl.plan.rows import counted, epochs, row_texts

if TYPE_CHECKING:
    from megarl.loop.preflight import Sets

_KEY_WIDTH = 14
_PREFERENCES = {"best_of_n": "prompts with candidates"}


def print_plan(config: RunConfig, sets: Sets, console: Console | None = None) -> None:
    """Prints who runs where, and what the run does with its data."""
    out = console or Console(highlight=False)
    table = Table("role", "group", "devices", "TP", "PP", "VPP", "DP", "EP", "SP", "tokens/micro-batch", box=None)
    for row in placement_rows(config):
        table.add_row(*row)
    out.print(table)
    for key, text in plan_lines(config, sets):
        out.print(f"{key:{_KEY_WIDTH}}{text}", soft_wrap=True, markup=False)


def placement_rows(config: RunConfig) -> Iterator[tuple[str, ...]]:
    """A row per role, the rollout last."""
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
    """What the run does, as pairs of a key and a text."""
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
    """Of a stage that trains on rollouts."""
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
    """What is answered and scored."""
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
    """The course of a learning rate over the optimizer steps of a run."""
    rise = f"rising over the first {optimizer.warmup:.0%}, then " if optimizer.warmup else ""
    ends = {"constant": "constant", "anneal": "annealed to 0 by the steps of the run"}
    end = ends.get(optimizer.schedule) or f"{optimizer.schedule} to {optimizer.final_lr:g}"
    return f"{optimizer.lr:g} in {counted(steps, 'optimizer step')}, {rise}{end}"


def _when(every: int | None) -> str:
    return "before the first step and after the last" if every is None else _every(every)


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"
