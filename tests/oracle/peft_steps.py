"""Steps on adapters by PEFT and transformers: the naive steps, of models to which PEFT has added adapters.

The argument is a directory. Of each ``NAME.case`` there, with the directory of a model, a loss and the
directory of adapters, it writes ``NAME.outcome``: steps, weights after them, and weights after
a ``GRADIENT_STEP``.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.megatron.supervised import naive_steps


def adapted(directory: Path, model: Any) -> Any:
    """The model with the adapters of a directory, which alone are trained, with a head."""
    from peft import PeftModel

    found: Any = PeftModel.from_pretrained(model, str(directory), is_trainable=True).base_model.model
    for name, parameter in found.named_parameters():
        if name.startswith("score."):
            parameter.requires_grad_()
    return found


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    weights = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            weights[name.replace(".default.", ".")] = parameter.detach()
    return weights


def main() -> None:
    for case in sorted(Path(sys.argv[1]).glob("*.case")):
        model, loss, adapters = case.read_text().splitlines()
        add = partial(adapted, Path(adapters))
        steps, trained = naive_steps(Path(model), loss, add)
        _, moved = naive_steps(Path(model), loss, add, gradients=True)
        outcome = {"steps": steps, "weights": trained_weights(trained), "moved": trained_weights(moved)}
        torch.save(outcome, case.with_suffix(".outcome"))


if __name__ == "__main__":
    main()
