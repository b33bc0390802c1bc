"""What an algorithm does with the samples of a step, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config import PPOConfig, RAFTConfig
from megarl.config.schema import Algo, Choice, Scores
from megarl.plan.rows import counted


def algorithm_lines(config: PPOConfig, rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The parts of an algorithm, as pairs of a key and a text; those that are off are left out.

    Args:
        rows: what is said of each source of data, by its field.
    """
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
    """Which samples of a step are learnt."""
    raft = config.raft
    only = ["that ended"] if raft.discard_unfinished else []
    if raft.min_score is not None:
        only.append(f"of a score from {raft.min_score:g} on")
    yield "selection", named(raft.strategy) + (f", of responses {' and '.join(only)}" if only else "")
    steps = counted(raft.epochs * raft.mini_batches, "optimizer step")
    yield "update", f"{counted(raft.epochs, 'epoch')} x {_mini_batches(raft.mini_batches)} = {steps}"


def shaping(scores: Scores) -> Iterator[str]:
    """What becomes of a score before the algorithm sees it."""
    if scores.truncate_at is not None:
        yield f"of responses up to token {scores.truncate_at.token} from place {scores.truncate_at.after} on"
    if scores.clip is not None:
        yield f"clipped to [{scores.clip[0]:g}, {scores.clip[1]:g}]"
    if scores.missing_end is not None:
        yield f"{named(scores.missing_end)} without an end"
    if scores.placement != "last_valid":
        yield "on every token"


def named(choice: Choice) -> str:
    """A choice with its options, but for those that are null or false."""
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
