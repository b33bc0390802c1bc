"""A policy loss gets the inputs that it names, and branches of a conversation weigh as one response."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algos.policy_loss import LossTerms
from megarl.algos.registry import AGGREGATIONS, POLICY_LOSSES, bound
from megarl.config.schema import Algo
from megarl.data.schedule import update_schedules
from megarl.experience.padded_batch import response_mask
from megarl.megatron.losses import LossInputs, aggregated
from megarl.types import Layout, SampleInfo
from tests.oracle import aggregation as naive

MASK = torch.tensor([[True, True], [True, False]])
COLUMNS = {
    "old_logprobs": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
    "rollout_logprobs": torch.tensor([[-1.5, -2.5], [-3.5, 0.0]]),
    "ref_logprobs": torch.tensor([[-0.5, -0.25], [-1.0, 0.0]]),
    "advantages": torch.tensor([[2.0, 4.0], [-1.0, 0.0]]),
    "old_values": torch.tensor([[3.0, 5.0], [7.0, 0.0]]),
}


class Experience:
    """Columns that note which were read."""

    def __init__(self) -> None:
        self.mask = MASK
        self.read: list[str] = []

    def __call__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return COLUMNS[name]


def policy_terms(algo: Algo) -> tuple[torch.Tensor, list[str]]:
    """The terms of a loss, and the columns that it read."""
    experience: Any = Experience()
    new = torch.tensor([[-1.0, -1.0], [-2.0, 0.0]])
    entropy = torch.tensor([[0.5, 0.25], [0.125, 0.0]])
    inputs = LossInputs(algo, experience, new, entropy)
    loss = bound(POLICY_LOSSES, algo.policy_loss.name, algo.policy_loss.options)
    found = loss(**{name: getattr(inputs, name) for name in algo.loss_reads})
    return found.values[MASK], experience.read


def test_a_loss_of_the_user_has_every_input() -> None:
    algo = Algo.model_validate({"policy_loss": "tests.own_functions:anchored"})
    values, read = policy_terms(algo)
    assert values.tolist() == [-0.5 * 3 - 0.5, -0.75 * 5 - 0.25, -1.0 * 7 - 0.125]
    assert sorted(read) == ["old_values", "ref_logprobs"]
    assert not algo.has_logprob_pass


def test_the_likelihood_reads_no_column() -> None:
    values, read = policy_terms(Algo.model_validate({"policy_loss": "sft", "advantage": "none", "mini_batches": 2}))
    assert (values.tolist(), read) == ([1.0, 1.0, 2.0], [])


@pytest.mark.parametrize(("settings", "columns"), [({}, []), ({"mini_batches": 2}, ["old_logprobs"])])
def test_old_log_probabilities_are_read_where_the_update_has_several_steps(settings: Any, columns: list[str]) -> None:
    _, read = policy_terms(Algo.model_validate({"advantage": "grpo", **settings}))
    assert sorted(read) == ["advantages", *columns]


BRANCHES = {"a": (3, 2), "b": (4,), "c": (1, 0, 6), "d": (5,)}
"""Sampled tokens of the branches of each conversation."""


def infos() -> list[SampleInfo]:
    rows = [(f"1/{name}/0" + (f"#{i}" if i else ""), n) for name, of in BRANCHES.items() for i, n in enumerate(of)]
    lengths = {"prompt_tokens": 2, "given_tokens": 1, "finished": True}
    return [
        SampleInfo(sample_id=sample_id, prompt_id=sample_id[2], chunk=0, row=row, response_tokens=tokens, **lengths)
        for row, (sample_id, tokens) in enumerate(rows)
    ]


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", ["token_mean", "token_sum", "sequence_mean", "sequence_sum", "sequence_sum_norm"])
def test_the_weight_of_a_token_is_that_in_its_whole_conversation(name: str, dp: int) -> None:
    options = {"tokens": 7} if name == "sequence_sum_norm" else {}
    algo = Algo.model_validate({"aggregation": {"name": name, **options}})
    aggregate = bound(AGGREGATIONS, algo.aggregation.name, algo.aggregation.options)
    (schedule,) = update_schedules(infos(), Layout(dp=dp), 30, mini_batches=1, epochs=1, seed=0, step=1)
    samples, lengths = infos(), [sum(of) for of in BRANCHES.values()]
    found: dict[int, float] = {}
    for rank in schedule.ranks:
        assert rank.total_sequences == len(BRANCHES)
        for rows in rank.packs:
            mask = response_mask([row.response_tokens for row in rows])
            whole = response_mask([row.sequence_tokens or row.response_tokens for row in rows])
            of: Any = SimpleNamespace(mask=mask, whole=whole)
            values = torch.ones(mask.shape, requires_grad=True)
            terms = LossTerms(values=values, metrics={})
            loss, _ = aggregated(aggregate, rank, terms, {}, of, learned=mask, reported=mask)
            loss.backward()
            assert values.grad is not None
            for row, weights in zip(rows, values.grad, strict=True):
                expected = getattr(naive, name)(sum(BRANCHES[samples[row.row].prompt_id]), lengths, **options)
                assert weights[: row.response_tokens].tolist() == pytest.approx([expected] * row.response_tokens)
                found[row.row] = float(weights.sum())
    assert sorted(found) == list(range(len(samples)))


def test_the_branches_of_a_conversation_are_in_one_mini_batch() -> None:
    for seed in range(20):
        schedules = update_schedules(infos(), Layout(), 30, mini_batches=3, epochs=1, seed=seed, step=1)
        samples = infos()
        of = [{samples[row.row].prompt_id for rows in s.ranks[0].packs for row in rows} for s in schedules]
        assert sum(map(len, of)) == len(BRANCHES)
        assert [schedule.ranks[0].total_sequences for schedule in schedules] == [len(names) for names in of]
    with pytest.raises(AssertionError, match="more mini-batches than samples"):
        update_schedules(infos(), Layout(), 30, mini_batches=5, epochs=1, seed=0, step=1)
