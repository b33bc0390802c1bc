"""A step of fine-tuning by transformers in float64, and how far another one is from it.

transformers computes norms and rotary angles in float32 whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.models import ModelSpec
from megarl.weights.hf_files import HFDirectory

if TYPE_CHECKING:
    import torch

OPTIMIZER: Mapping[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-3, "clip_grad": None}
"""With so large an eps a step of Adam does not amplify the rounding of small gradients."""

Texts = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Prompts and responses."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of fine-tuning.

    Args:
        before: mean negative log-likelihood of a response token before the step, nats.
        after: the same after it.
        grad_norm: norm of the gradient of all parameters.
        weights: tensors after the step, by their names in files.
    """

    before: float
    after: float
    grad_norm: float
    weights: Mapping[str, torch.Tensor]


def transformers_step(directory: Path, saved: Path, spec: ModelSpec, texts: Texts) -> Step:
    """Returns the step that transformers takes, and saves the model after it."""
    import torch
    import transformers

    model: Any = getattr(transformers, spec.family.lm_class).from_pretrained(
        directory,
        dtype=torch.float64,
        experts_implementation="eager",  # torch's grouped products have no float64
    )
    model.eval()
    tokens = sum(len(response) for _, response in texts)

    def losses() -> Any:
        for prompt, response in texts:
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])
            yield -chosen.sum() / tokens

    before = 0.0
    for loss in losses():
        loss.backward()
        before += float(loss.detach())
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grad_norm = float(torch.nn.utils.get_total_norm([parameter.grad for parameter in trained]))
    adam = {"lr": OPTIMIZER["lr"], "betas": tuple(OPTIMIZER["betas"]), "eps": OPTIMIZER["eps"]}
    torch.optim.AdamW(trained, **adam, weight_decay=0.0).step()
    with torch.no_grad():
        after = sum(float(loss) for loss in losses())
    model.save_pretrained(saved)
    return Step(before=before, after=after, grad_norm=grad_norm, weights=read_weights(saved))


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a directory."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in set(HFDirectory(directory).file_of.values()):
        found |= load_file(file)
    return found


def differences(found: Step, expected: Step) -> dict[str, float]:
    """Returns relative differences of losses and gradient norm, and that of weights per learning rate.

    Raises:
        ValueError: the files have other tensors.
    """
    others = found.weights.keys() ^ expected.weights.keys()
    if others:
        names = ", ".join(sorted(others)[:5])
        raise ValueError(f"the export has other tensors than transformers: {names}")
    import torch

    weights: list[torch.Tensor] = []
    for name, value in expected.weights.items():
        weights.append((found.weights[name].double() - value.double()).abs().max())
    return {
        "loss": _relative(found.before, expected.before),
        "gradient": _relative(found.grad_norm, expected.grad_norm),
        "weights": float(torch.stack(weights).max()) / OPTIMIZER["lr"],  # NaN, if there is one
        "next loss": _relative(found.after, expected.after),
    }


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)
