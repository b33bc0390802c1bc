"""The call stacks between `train` and a policy loss, recorded within a run by the driver and the actor's workers."""

from __future__ import annotations

import os
import traceback
from typing import Any

from torch import Tensor

from megarl.algos.policy_loss import LossTerms, ppo
from megarl.cluster.workers import WorkerGroup

DIRECTORY = "FRAMES_DIRECTORY"
"""The environment variable that names the directory of the stacks."""
_COUNTED = ("/megarl/", "/megatron/core/", "/tests/e2e/")


def _note(process: str) -> None:
    """Writes the functions of this stack that are the product's, megatron-core's or the loss; the outermost first."""
    stack = traceback.extract_stack()[:-1]
    frames = [frame for frame in stack if any(part in frame.filename for part in _COUNTED)]
    with open(f"{os.environ[DIRECTORY]}/{process}", "w", encoding="utf-8") as file:
        file.writelines(f"{frame.name} {frame.filename}\n" for frame in frames if frame.name != "noting")


def noted_ppo(new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> LossTerms:
    """PPO's loss; records its call stack."""
    _note("worker")
    return ppo(new_logprobs, old_logprobs, advantages, response_mask)


def note_updates() -> None:
    """Makes the driver record the stack of every call of `MegatronWorker.update`."""
    submit = WorkerGroup.submit

    def noting(group: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method.name == "update":
            _note("driver")
        return submit(group, method, *args, **kwargs)

    WorkerGroup.submit = noting
