"""What corrections for rollouts of another policy need, and the course of the engines' weights."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.problems import Problem
from megarl.config.rules.unused import unused
from megarl.config.schema import Algo, PeriodicEvaluation, Rollout
from megarl.config.schema.correction import RolloutWeights
from megarl.config.schema.run import Checkpoint


def ratios_differ_from_one(algo: Algo) -> Iterator[Problem]:
    """Where the old log-probabilities are the engines', their ratio to these is 1."""
    correction = algo.correction
    if correction.old_logprobs == "rollout":
        where = "with algo.correction.old_logprobs = rollout: the ratio to the engines is 1"
        names = ("weights", "reject", "m2po")
        yield from unused("algo.correction", correction, names, where, "or recompute the old log-probabilities")
    elif correction.old_logprobs != "recompute":
        where = f"with algo.correction.old_logprobs = {correction.old_logprobs}, which are known in the update alone"
        yield from unused("algo.correction", correction, ("reject", "m2po"), where, "or recompute them")


def bounds_are_in_order(algo: Algo) -> Iterator[Problem]:
    """Lower bounds are below upper ones, and where there may be any."""
    weights = algo.correction.weights
    if isinstance(weights, RolloutWeights) and weights.lower is not None and weights.lower >= weights.upper:
        rule = f"below algo.correction.weights.upper = {weights.upper:g}"
        yield Problem(field="algo.correction.weights.lower", value=f"{weights.lower:g}", rule=rule, fix="lower it")
    for index, reject in enumerate(algo.correction.reject):
        field = f"algo.correction.reject.{index}.lower"
        if reject.lower is None:
            if reject.statistic.endswith("k1") and reject.upper <= 1:
                rule, value = "above 1, or with a lower bound: the usual one is 1 / upper", f"{reject.upper:g}"
                fix = "raise it, or give lower"
                yield Problem(field=f"algo.correction.reject.{index}.upper", value=value, rule=rule, fix=fix)
            continue
        if not reject.statistic.endswith("k1"):
            rule, fix = f"for k1 alone; {reject.statistic} is never negative", "remove it"
            yield Problem(field=field, value=f"{reject.lower:g}", rule=rule, fix=fix)
        elif reject.lower >= reject.upper:
            rule = f"below algo.correction.reject.{index}.upper = {reject.upper:g}"
            yield Problem(field=field, value=f"{reject.lower:g}", rule=rule, fix="lower it")


def interpolation_has_an_age(algo: Algo, rollout: Rollout) -> Iterator[Problem]:
    """Log-probabilities between the engines' and the actor's are for rollouts of older weights."""
    chosen = algo.correction.old_logprobs
    if chosen in ("loglinear", "linear") and rollout.sync_every == 1:
        rule = "recompute or rollout with rollout.sync_every = 1, where no rollout is older than the actor"
        fix = "set it to recompute, or raise rollout.sync_every"
        yield Problem(field="algo.correction.old_logprobs", value=chosen, rule=rule, fix=fix)


def normalised_weights_are_known(algo: Algo) -> Iterator[Problem]:
    """Weights to log-probabilities that are known in the update alone have no mean over the step."""
    weights, chosen = algo.correction.weights, algo.correction.old_logprobs
    if isinstance(weights, RolloutWeights) and weights.batch_normalise and chosen in ("loglinear", "linear"):
        rule = f"false with algo.correction.old_logprobs = {chosen}, which changes in each micro-batch"
        fix = "set it to false, or recompute the old log-probabilities"
        yield Problem(field="algo.correction.weights.batch_normalise", value="True", rule=rule, fix=fix)


def old_weights_are_kept(rollout: Rollout) -> Iterator[Problem]:
    """Engines that sleep drop their weights, and get those of the moment when they wake."""
    if rollout.sleep and rollout.sync_every > 1:
        fix = "set it to 1, or give the engines devices of their own and set rollout.sleep to false"
        yield Problem(field="rollout.sync_every", value=str(rollout.sync_every), rule="1 with rollout.sleep", fix=fix)


def syncs_meet(rollout: Rollout, evaluation: PeriodicEvaluation | None, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Evaluations and checkpoints are of weights that the engines have."""
    named = {"evaluation.every": None if evaluation is None else evaluation.every, "checkpoint.every": checkpoint.every}
    for field, every in named.items():
        if every is not None and every % rollout.sync_every:
            rule = f"a multiple of rollout.sync_every = {rollout.sync_every}: the engines have older weights otherwise"
            fix = f"choose a multiple of {rollout.sync_every}"
            yield Problem(field=field, value=str(every), rule=rule, fix=fix)


RULES = (ratios_differ_from_one, bounds_are_in_order, interpolation_has_an_age, normalised_weights_are_known)
