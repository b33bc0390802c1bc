"""A policy loss gets the inputs that it names, and no other column of the experience is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.algos.registry import POLICY_LOSSES, bound
from megarl.config.schema import Algo
from megarl.megatron.losses import LossInputs

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


def terms(algo: Algo) -> tuple[torch.Tensor, list[str]]:
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
    values, read = terms(algo)
    assert values.tolist() == [-0.5 * 3 - 0.5, -0.75 * 5 - 0.25, -1.0 * 7 - 0.125]
    assert sorted(read) == ["old_values", "ref_logprobs"]
    assert not algo.has_logprob_pass


def test_the_likelihood_reads_no_column() -> None:
    values, read = terms(Algo.model_validate({"policy_loss": "sft", "advantage": "none", "mini_batches": 2}))
    assert (values.tolist(), read) == ([1.0, 1.0, 2.0], [])


@pytest.mark.parametrize(("settings", "columns"), [({}, []), ({"mini_batches": 2}, ["old_logprobs"])])
def test_old_log_probabilities_are_read_where_the_update_has_several_steps(settings: Any, columns: list[str]) -> None:
    _, read = terms(Algo.model_validate({"advantage": "grpo", **settings}))
    assert sorted(read) == ["advantages", *columns]
