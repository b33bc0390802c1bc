"""Rules of optimizers and of the updates of a step."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.problems import Broken, Problem, ineffective_settings, shown
from megarl.config.schema import (
    STAGES,
    Algo,
    CheckpointSettings,
    Critic,
    Groups,
    Health,
    Optimizer,
    PairData,
    PeriodicEvaluation,
    Profiling,
    PromptData,
    Rollout,
    RowSettings,
    TextData,
    TrainingRun,
    trains_on_rollouts,
)
from megarl.config.schema.base import parse_devices


def rates_fall(field: str, optimizer: Optimizer) -> Iterator[Broken]:
    """A schedule comes down to its final learning rate."""
    if optimizer.schedule in ("linear", "cosine") and optimizer.final_lr >= optimizer.lr:
        rule = f"below lr = {optimizer.lr:g}, from which a {optimizer.schedule} schedule comes down"
        yield f"{field}.final_lr", rule, "lower it"


def kept_checkpoints_are_made(checkpoint: CheckpointSettings) -> Iterator[Broken]:
    """Checkpoints that are kept besides the newest ones are made."""
    every = checkpoint.every
    if checkpoint.keep_every is not None and (every is None or checkpoint.keep_every % every):
        fix = "choose a multiple, or remove it"
        yield "checkpoint.keep_every", f"a multiple of checkpoint.every = {shown(every)}", fix


def best_checkpoints_are_evaluated(
    checkpoint: CheckpointSettings, data: RowSettings, evaluation: PeriodicEvaluation | None
) -> Iterator[Broken]:
    """Every checkpoint has an evaluation if the best one is kept."""
    if checkpoint.best is None:
        return
    section = "evaluation"
    field = "evaluation.every"
    given = evaluation
    every = evaluation and evaluation.every
    if isinstance(data, TextData | PairData):
        section = "data.evaluation"
        field = "data.evaluate_every"
        given = data.evaluation
        every = data.evaluate_every
    if given is None:
        yield "checkpoint.best", f"a metric of {section}, which is missing", "give it, or remove this"
    elif checkpoint.every is None or every is None or checkpoint.every % every:
        rule = f"checkpoint.every = {shown(checkpoint.every)} must be a multiple of {field} = {shown(every)}"
        fix = "set both so that each checkpoint is evaluated, or remove checkpoint.best"
        yield "checkpoint.best", rule, fix


def warm_ups_end(critic: Critic, run: TrainingRun) -> Iterator[Broken]:
    """The critic's warm-up ends before the run does."""
    if run.steps is not None and critic.warmup_steps >= run.steps:
        rule = f"below run.steps = {run.steps}: the actor would not be trained"
        yield "critic.warmup_steps", rule, f"lower it, or raise {run.length_field}"


def profiles_have_an_effect(
    profile: Profiling, run: TrainingRun, groups: Groups, rollout: Rollout | None
) -> Iterator[Broken]:
    """The profiled steps, ranks and engines are those of the run."""
    engines = profile.profiled_engines(rollout)
    sizes = [len(parse_devices(group.devices)) for group in groups.values()]
    limits = {"ranks": (profile.ranks, max(sizes))}
    if run.steps is not None:  # those of epochs are known when the rows are read
        limits["steps"] = (profile.profiled_steps(run.steps), run.steps + 1)
    if rollout is not None:
        limits["engines"] = (engines, rollout.engines)
    for name, (given, limit) in limits.items():
        if max(given, default=0) >= limit:
            yield Problem(f"profile.{name}", shown(given), f"the run has none above {limit - 1}", "remove it")
    if not profile.ranks and (rollout is None or not engines):
        yield "profile.ranks", "a rank or an engine must be profiled", "add 0, or set profile to null"
    if rollout is not None and rollout.tp > 1 and engines:
        rule = f"rollout.tp = {rollout.tp}: an engine of several ranks computes in processes that are not profiled"
        yield Problem("profile.engines", shown(engines), rule, "remove it")


def health_checks_have_metrics(stage: str, health: Health) -> Iterator[Broken]:
    """The checked metrics are those of the stage: of rollouts, or with the stage's name."""
    for field, names in {"limits": health.limits, "stop": health.stop}.items():
        for name in names:
            group = name.partition("/")[0]
            is_common = group in ("skipped", "not finite")
            of_rollouts = group not in STAGES and trains_on_rollouts(stage)
            if group != stage and not is_common and not of_rollouts:
                yield Problem(f"health.{field}", name, f"a metric of stage {stage}", "remove it")


def samples_fill_mini_batches(algo: Algo, data: PromptData) -> Iterator[Broken]:
    """mini_batches divides the samples of a step, or is at most the selected ones."""
    samples = data.samples_per_step
    if algo.select is None:
        if samples % algo.mini_batches:
            rule = f"must divide data.prompts_per_step * data.samples_per_prompt = {samples}"
            yield "algo.mini_batches", rule, f"choose a divisor of {samples}"
        return
    selected = data.prompts_per_step
    if algo.select.by.name == "top":
        selected = int(algo.select.by.options["fraction"] * samples)
    if algo.mini_batches > selected:
        rule = f"at most {selected}, the samples that are selected in a step"
        yield "algo.mini_batches", rule, "lower it, or raise data.prompts_per_step"
    if algo.select.discard_unfinished and algo.scores.truncate_at is None:
        where = "with algo.select.discard_unfinished"
        otherwise = "or set algo.select.discard_unfinished to false"
        yield from ineffective_settings("algo.scores", algo.scores, ("missing_end",), where, otherwise)


def losses_have_their_advantages(algo: Algo) -> Iterator[Broken]:
    """The likelihood of samples has no advantages; other losses have some, or a penalty's."""
    if not algo.is_likelihood:
        reads = "advantages" in algo.loss_reads and algo.kl.coef == 0
        if algo.advantage.name == "none" and reads:
            rule = f"an advantage, which policy loss {algo.policy_loss.name} reads"
            yield "algo.advantage", rule, "choose one, such as grpo, or policy loss sft"
        return
    if algo.advantage.name != "none":
        rule = "none with policy loss sft, the likelihood of samples"
        yield "algo.advantage", rule, "set it to none, or choose another policy loss"
