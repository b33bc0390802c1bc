"""The oracle's formulas against the public vectors, and by hand where there are none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle import (
    adam,
    advantages,
    aggregation,
    comparisons,
    corrections,
    kl,
    normalisation,
    policy,
    scores,
    selection,
    values,
)
from tests.oracle.models import Sample

CASES = {
    case["id"]: case for case in json.loads((Path(__file__).parents[1] / "algos" / "vectors.json").read_text())["cases"]
}


def given(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments and outputs of a vector."""
    return CASES[name]["args"], CASES[name]["expected"]


def rows(matrix: Sequence[Sequence[float]], mask: Sequence[Sequence[float]]) -> list[list[float]]:
    """The unmasked numbers."""
    return [[x for x, m in zip(*row, strict=True) if m] for row in zip(matrix, mask, strict=True)]


def close(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-11)


# ---- comparisons


def answers(args: dict[str, Any]) -> list[Sample]:
    lengths = args.get("lengths") or [1] * len(args["rewards"])
    names = sorted(set(args["groups"]))
    return [
        Sample(sample_id=str(i), prompt_ids=[1], response_ids=[2] * length, group=names.index(group))
        for i, (group, length) in enumerate(zip(args["groups"], lengths, strict=True))
    ]


@pytest.mark.parametrize(
    ("name", "compare"),
    [
        ("grp-01", comparisons.grpo),
        ("grp-02", partial(comparisons.grpo, eps=1e-4)),
        ("grp-04", comparisons.dr_grpo),
        ("grp-06", comparisons.rloo_std),
        ("grp-07", comparisons.opo),
        ("grp-09", partial(comparisons.batch_std, eps=1e-4)),
        ("grp-12", comparisons.grpo),
    ],
)
def test_group_advantages(name: str, compare: Callable[..., list[float]]) -> None:
    args, expected = given(name)
    close(compare(answers(args), args["rewards"]), expected["advantages"])


def compared(numbers: Sequence[float | None], compare: Callable[..., list[float]], **fields: Any) -> list[float]:
    """Of samples of one prompt; ``fields`` are columns."""
    samples = [
        Sample(
            sample_id=str(i), prompt_ids=[1], response_ids=[2], **{name: column[i] for name, column in fields.items()}
        )
        for i in range(len(numbers))
    ]
    return compare(samples, numbers)


def test_group_advantages_by_hand() -> None:
    assert compared([1.0, 4.0, 2.5], comparisons.rloo) == [-2.25, 2.25, 0.0]
    assert compared([1.0, None, 3.0], comparisons.dr_grpo) == [-1.0, 0.0, 1.0], "as if it was not there"
    assert compared([1.0, 3.0], comparisons.remax, greedy_score=[0.5, 0.25]) == [0.5, 2.75]
    close(compared([1.0, 3.0, 2.0], comparisons.pass_at_k), [0.0, 1 / (1 + 1e-6), 0.0])
    masked = compared([9.0, 1.0, 3.0], comparisons.masked_rloo, finished=[False, True, True])
    assert masked == [5.0, -2.0, 2.0]
    assert compared([2.0, 2.0, 5.0, 2.0], comparisons.gpg, group=[0, 0, 1, 1]) == [0.0, 0.0, 3.0, -3.0]


def test_penalties_are_summed_to_the_end_or_kept_per_token() -> None:
    assert comparisons.reward_to_go_of(1.0, [-0.5, 0.0, -0.25], cumulative=True) == [0.25, 0.75, 0.75]
    assert comparisons.reward_to_go_of(1.0, [-0.5, 0.0, -0.25], cumulative=False) == [0.5, 1.0, 0.75]


def test_components_are_normalised_and_then_whitened() -> None:
    args, expected = given("gdpo-01")
    columns = {"components": list(zip(*args["components"], strict=True)), "group": args["groups"]}
    outcomes = compared([0.0] * 4, partial(comparisons.gdpo, weights=args["weights"]), **columns)
    close(outcomes, expected["sequence"])
    tokens = [[one] * sum(row) for one, row in zip(outcomes, args["mask"], strict=True)]
    close(normalisation.whiten(tokens, ddof=1), rows(expected["advantages"], args["mask"]))


# ---- advantages and normalisation


def test_gae_by_hand() -> None:
    # deltas: 1 + .5 * 1 - .5 = 1;  0 + .5 * -1 - 1 = -1.5;  2 + 1 = 3, each decayed by .25
    found = advantages.gae([1.0, 0.0, 2.0], [0.5, 1.0, -1.0], gamma=0.5, lam=0.5)
    assert found == ([0.8125, -0.75, 3.0], [1.3125, 0.25, 2.0])


def test_vapo_lambdas() -> None:
    args, expected = given("gae-11")
    for i, (rewards, old) in enumerate(
        zip(rows(args["rewards"], args["mask"]), rows(args["values"], args["mask"]), strict=True)
    ):
        found = advantages.vapo(rewards, old)
        for own, name in zip(found, ("advantages", "returns"), strict=True):
            assert own == pytest.approx(rows(expected[name], args["mask"])[i], rel=1e-9, abs=1e-11)


def test_reinforce_plus_plus() -> None:
    args, expected = given("rpp-01")
    returns = [advantages.reward_to_go(rewards)[1] for rewards in rows(args["rewards"], args["mask"])]
    close(returns, rows(expected["returns"], args["mask"]))
    close(normalisation.whiten(returns, ddof=1), rows(expected["advantages"], args["mask"]))


@pytest.mark.parametrize("name", ["wh-01", "wh-02", "wh-04", "wh-06", "wh-07", "wh-13"])
def test_whitening(name: str) -> None:
    args, expected = given(name)
    mask = args.get("mask") or [[1] * 3] * 3
    same = {key: args[key] for key in ("ddof", "form", "eps") if key in args}
    found = normalisation.whiten(rows(args["x"], mask), keep_mean=not args.get("shift_mean", True), **same)
    close(found, rows(expected["whitened"], mask))


def test_group_levels() -> None:
    args, expected = given("gn-01")
    found = normalisation.grouped_tokens(rows(args["adv"], args["mask"]), [0, 0, 1, 1])
    close(found, rows(expected["advantages"], args["mask"]))
    args, expected = given("gn-03")
    found = normalisation.levels([[x] for x in args["x"]], [0, 0, 0, 1, 1, 1], mean="group", std="batch")
    close([x for (x,) in found], expected["out"])
    args, expected = given("gn-05")
    found = normalisation.levels(rows(args["x"], args["mask"]), [0, 0, 1, 1], mean="group", std=None)
    close(found, rows(expected["out"], args["mask"]))


# ---- losses


def total(loss: Callable[..., tuple[Tensor, Tensor]], args: dict[str, Any], names: Sequence[str]) -> tuple[Any, Any]:
    """The sum of a loss with the weights of a vector, and its gradient by the first argument."""
    first, *rest = (rows(args[name], args["mask"]) for name in names)
    kept = [i for i, row in enumerate(first) if row]
    lengths = [len(first[i]) for i in kept]
    weigh = aggregation.sequence_mean if args.get("agg") == "seq-mean-token-mean" else aggregation.token_mean
    leaves = [torch.tensor(first[i], dtype=torch.float64, requires_grad=True) for i in kept]
    terms = [
        loss(leaf, *(torch.tensor(column[i], dtype=torch.float64) for column in rest))[0].sum()
        * weigh(len(leaf), lengths)
        for i, leaf in zip(kept, leaves, strict=True)
    ]
    torch.stack(terms).sum().backward()
    return sum(term.item() for term in terms), [leaf.grad.tolist() for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("pg-01", policy.ppo),
        ("pg-04", partial(policy.ppo, dual_clip=3.0)),
        ("pg-06", policy.ppo),
        ("pg-09", partial(policy.ppo, ratio_clamp=(0.0, 10.0))),
        ("pg-11", policy.ppo),
        ("pg-12", policy.ppo),
        ("gspo-02", policy.gspo),
        ("cispo-02", partial(policy.cispo, clip_high=0.5, upper_only=True)),
        ("sapo-01", policy.sapo),
    ],
)
def test_policy_losses(name: str, loss: Callable[..., tuple[Tensor, Tensor]]) -> None:
    args, expected = given(name)
    found, gradients = total(loss, args, ("new", "old", "adv"))
    assert found == pytest.approx(expected["loss"], rel=1e-9)
    close(gradients, [row for row in rows(expected["grad"], args["mask"]) if row])


def test_the_geometric_mean_is_per_response() -> None:
    args, expected = given("gmpo-01")
    found, gradients = total(policy.gmpo, {**args, "agg": "seq-mean-token-mean"}, ("new", "old", "adv"))
    assert found == pytest.approx(expected["loss"], rel=1e-9)
    close(gradients, rows(expected["grad"], args["mask"]))


def test_cispo_and_reinforce_by_hand() -> None:
    new, old = torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, 0.0])  # ratios e and 1 / e
    advantage = torch.tensor([2.0, 2.0])
    assert policy.cispo(new, old, advantage, clip=0.5)[0].tolist() == pytest.approx([3.0, 1.0])
    assert policy.reinforce(new, old, advantage)[0].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", ["vf-01", "vf-02", "vf-04", "vf-06"])
def test_value_losses(name: str) -> None:
    args, expected = given(name)
    loss = values.huber if args.get("loss_type") == "huber" else values.mse
    clip = args.get("clip", 0.2)
    found, gradients = total(partial(loss, clip=clip), args, ("values", "old_values", "returns"))
    assert found == pytest.approx(expected["loss"], rel=1e-9)
    close(gradients, [row for row in rows(expected["grad"], args["mask"]) if row])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (aggregation.token_mean, 0.25),
        (aggregation.token_sum, 1.0),
        (aggregation.sequence_mean, 1 / 6),
        (aggregation.sequence_sum, 0.5),
        (partial(aggregation.sequence_sum_norm, tokens=8), 1 / 16),
    ],
)
def test_aggregation_weights_of_a_long_and_a_short_response(mode: Any, expected: float) -> None:
    assert mode(3, [3, 1]) == pytest.approx(expected)


# ---- divergence


def test_divergence_by_hand() -> None:
    new, ref = torch.tensor([-1.0], requires_grad=True), torch.tensor([-1.5])
    for estimate, value, slope in [
        (kl.k1, 0.5, 1.0),
        (kl.k2, 0.125, 0.5),
        (kl.k3, math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        (kl.absolute, 0.5, 1.0),
        (kl.k1_plus, 0.5, 0.5),
        (kl.k3_plus, math.exp(-0.5) - 0.5, 0.5),
    ]:
        found = estimate(new, ref)
        assert found.item() == pytest.approx(value, rel=1e-6), estimate
        assert torch.autograd.grad(found.sum(), new)[0].item() == pytest.approx(slope, rel=1e-6), estimate
    flat = torch.zeros(1, 4)
    sharp = torch.tensor([[0.0, 0.0, 0.0, math.log(5.0)]])  # 1/8, 1/8, 1/8, 5/8
    assert kl.full(flat, sharp, 1.0).item() == pytest.approx(
        math.log(1 / 4) - (3 * math.log(1 / 8) + math.log(5 / 8)) / 4
    )


def test_the_coefficient_follows_its_target() -> None:
    args, expected = given("klc-01")
    coef, found = args["init"], []
    for observed, episodes in args["updates"]:
        coef = kl.adapted(coef, observed, episodes, target=args["target"], horizon=args["horizon"])
        found.append(coef)
    close(found, expected["values"])


# ---- corrections


@pytest.mark.parametrize(
    ("name", "weigh"),
    [
        ("is-01", corrections.token_truncate),
        ("is-02", partial(corrections.token_truncate, lower=0.7, upper=1.3)),
        ("is-04", partial(corrections.sequence_truncate, upper=1.3)),
        ("is-06", partial(corrections.geometric_mask, lower=0.85, upper=1.1)),
        ("is-07", partial(corrections.geometric_truncate, lower=0.9, upper=1.1)),
    ],
)
def test_weights(name: str, weigh: Callable[..., list[float]]) -> None:
    args, expected = given(name)
    columns = (rows(args[key], args["mask"]) for key in ("train", "rollout"))
    found = [weigh(old, rollout) for old, rollout in zip(*columns, strict=True)]
    close(found, rows(expected["weights"], args["mask"]))


def test_weights_of_mean_one() -> None:
    args, expected = given("is-09")
    columns = (rows(args[key], args["mask"]) for key in ("train", "rollout"))
    found = [corrections.sequence_truncate(old, rollout, upper=1.3) for old, rollout in zip(*columns, strict=True)]
    close(corrections.normalised(found, by_sequence=True), rows(expected["weights"], args["mask"]))


def test_masks() -> None:
    old, rollout = [-1.0, -2.0], [-1.0 - math.log(3), -2.0]  # ratios 3 and 1
    assert corrections.token_mask(old, rollout, upper=2.0) == [0.0, 1.0]
    assert corrections.sequence_mask(old, rollout, upper=2.0) == [0.0, 0.0]
    args, expected = given("is-13")
    low, high = (math.log(bound) for bound in args["thresholds"][0])  # of the ratio
    columns = (rows(args[key], args["mask"]) for key in ("train", "rollout"))
    statistic = partial(corrections.rejected, of=lambda d: d, level="sum", lower=low, upper=high)
    found = [statistic(one, other) for one, other in zip(*columns, strict=True)]
    close(found, rows(expected["mask"], args["mask"]))


def test_sequence_and_token_masks() -> None:
    args, expected = given("is-14")
    columns = [rows(args[key], args["mask"]) for key in ("new", "behav")]
    keep = [
        corrections.off_policy_sequence([advantage], new, behav, delta=args["delta"])
        for advantage, new, behav in zip(args["adv"], *columns, strict=True)
    ]
    assert keep == expected["keep"]
    args, expected = given("is-18")
    pairs = zip(*(rows(args[key], args["mask"]) for key in ("behav", "prox")), strict=True)
    differences = [[b - p for b, p in zip(*pair, strict=True)] for pair in pairs]
    close(corrections.second_moment(differences, threshold=args["threshold"]), rows(expected["mask"], args["mask"]))
    args, expected = given("is-16")
    for behav, new, versions, logprobs in zip(
        args["behav"], args["new"], args["versions"], expected["logprobs"], strict=True
    ):
        found = corrections.between(behav, new, versions, current=args["current_version"])
        counted = [i for i, version in enumerate(versions) if version >= 0]
        assert [found[i] for i in counted] == pytest.approx([logprobs[i] for i in counted], rel=1e-9)


# ---- scores, selection, averages


def sample(score: float | None = 0.0, *, finished: bool = True, group: int = 0, tokens: int = 4) -> Sample:
    ids = list(range(10, 10 + tokens))
    return Sample(sample_id="", prompt_ids=[1], response_ids=ids, score=score, finished=finished, group=group)


def test_scores_by_hand() -> None:
    unfinished = sample(7.0, finished=False)
    assert scores.shaped(sample(7.0), [partial(scores.clipped, high=5.0)]) == 5.0
    assert scores.shaped(unfinished, [partial(scores.clipped, high=5.0), scores.replaced]) == -1.0
    assert scores.shaped(unfinished, [partial(scores.less, penalty=0.5)]) == 6.5
    assert scores.shaped(unfinished, [partial(scores.scaled, factor=0.5)]) == 3.5
    assert scores.shaped(sample(None), [scores.replaced]) is None
    punished = [scores.overlong(1.0, sample(tokens=n), most=8, buffer=4) for n in (3, 4, 6, 8, 9)]
    assert punished == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_truncation_at_a_token() -> None:
    short = scores.truncated(sample(tokens=6), 12)
    assert (list(short.response_ids), short.finished) == ([10, 11, 12], True)
    assert not scores.truncated(sample(tokens=6), 12, after=3).finished


def test_selection_by_hand() -> None:
    samples = [sample(score, group=group) for group, score in [(0, 1.0), (0, 3.0), (1, None), (2, 3.0), (2, 3.0)]]
    assert selection.best_of_each(samples) == [samples[1], samples[3]]
    assert [id(s) for s in selection.best_of_all(samples, 0.4)] == [id(samples[4]), id(samples[3])]
    assert selection.deviating([0.0, 1.0])
    assert not selection.deviating([1.0, 1.0])
    assert [selection.between(group) for group in ([0.0, 0.0], [0.0, 1.0], [1.0, 1.0])] == [False, True, False]


@pytest.mark.parametrize("name", ["adam-01", "adam-02", "adam-04"])
def test_both_kinds_of_adam(name: str) -> None:
    args, expected = given(name)
    model = torch.nn.Module()
    model.p = torch.nn.Parameter(torch.tensor(args["params"], dtype=torch.float64))
    settings = adam.AdamSettings(
        lr=args["lr"],
        betas=(0.9, args.get("beta2", 0.999)),
        eps=args.get("eps", 1e-5),
        clip_grad=None,
        tensorflow=args.get("style", "tensorflow") == "tensorflow",
    )
    optimizer, found = adam.Adam(model, settings), []
    for gradient in args["grads"]:
        model.p.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        found.append(model.p.tolist())
    close(found, expected["params"])


def test_moving_averages() -> None:
    args, expected = given("ema-01")
    model = torch.nn.Module()
    average, found = {"p": torch.tensor(args["ema0"], dtype=torch.float64)}, []
    for parameters in args["params"]:
        model.p = torch.nn.Parameter(torch.tensor(parameters, dtype=torch.float64))
        average = adam.averaged(average, model, args.get("beta", 0.992))
        found.append(average["p"].tolist())
    close(found, expected["ema"])
