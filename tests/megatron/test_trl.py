"""A step on preferences against TRL's DPOTrainer, and divergences from a teacher against its GKDTrainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos import kl
from megarl.config.schema.training_sections import DIRECT_LOSSES
from megarl.data.batches import text_batch
from megarl.data.schedule import inference_schedule, step_schedule
from megarl.data.training_texts import TrainingText
from megarl.megatron.parallel import GroupCache
from megarl.megatron.supervised_losses import DirectPreferenceLoss
from megarl.types import Layout
from tests.megatron.compare import GRADIENT_STEP, everywhere, logprobs_by_chunk, shards_of, weights_of
from tests.megatron.tiny import load_role, save_model
from tests.needs import lacking
from tests.oracle.trl_losses import BETAS, END, logits
from tests.pool import RankPool

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
ROWS = 6
LAYOUT = Layout(tp=2, sequence_parallel=True, pp=2)
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    # ours, and TRL's settings, whose label smoothing has no effect on sigmoid (1.16.0)
    "dpo": (DIRECT_LOSSES("dpo", beta=0.3), {"loss_type": ["sigmoid"], "beta": 0.3}),
    "hinge": (DIRECT_LOSSES("hinge", beta=0.3), {"loss_type": ["hinge"], "beta": 0.3}),
    "ipo": (DIRECT_LOSSES("ipo", beta=0.3), {"loss_type": ["ipo"], "beta": 0.3}),
}


def pairs() -> list[TrainingText]:
    """Pairs of random tokens whose responses end."""
    random = np.random.default_rng(3)
    rows = []
    for index in range(ROWS):
        prompt, *responses = [random.integers(END, size=length).astype(np.int32) for length in random.integers(1, 9, 3)]
        ended = [np.append(response, np.int32(END)) for response in responses]
        rows.append(TrainingText(key=str(index), prompt_ids=prompt, responses=tuple(ended)))
    return rows


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models, and what TRL made of them."""
    packages = list((ROOT / ".venv-trl/lib").glob("python3*/site-packages"))
    if not packages:
        lacking("make trl installs TRL")
    directory = tmp_path_factory.mktemp("trl")
    save_model(directory / "policy", seed=0)
    save_model(directory / "reference", seed=1)
    rows = []
    for pair in pairs():
        chosen, rejected = (response.tolist() for response in pair.responses)
        rows.append(
            json.dumps({"prompt_ids": pair.prompt_ids.tolist(), "chosen_ids": chosen, "rejected_ids": rejected})
        )
    (directory / "pairs.jsonl").write_text("\n".join(rows))
    (directory / "losses.json").write_text(json.dumps({name: settings for name, (_, settings) in LOSSES.items()}))
    path = os.pathsep.join([str(ROOT), *map(str, packages)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.oracle.trl_losses", str(directory)],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return directory


def step_of(rank: int, directory: Path, loss: str) -> tuple[dict[str, float], list[Any]]:
    """The metrics of a step, and the gradient by shards."""
    cache = GroupCache()
    reference = load_role(directory / "reference", "reference", LAYOUT, rank, cache)
    samples, chunks = text_batch(pairs(), 2)
    forward = inference_schedule(samples, LAYOUT, 40).ranks[reference.coords.dp]
    columns = everywhere(logprobs_by_chunk(reference, forward, chunks, 1.0))
    scored = []
    for index, chunk in enumerate(chunks):
        sums = np.array([row.sum(dtype=np.float64) for row in columns[index]], dtype=np.float32)
        scored.append(replace(chunk, ref_logprobs=sums))
    role = load_role(directory / "policy", "actor", LAYOUT, rank, cache, trainable=True)
    role.start_training(GRADIENT_STEP, total_steps=1)
    before = weights_of(role)
    schedule = step_schedule(samples, LAYOUT, 40, rows_per_unit=2).ranks[role.coords.dp]
    (step,) = role.update([schedule], scored, partial(DirectPreferenceLoss, role, LOSSES[loss][0], scored))
    moved = {name: before[name] - after for name, after in weights_of(role).items()}
    return step if role.reports else {}, shards_of(role, moved)


@pytest.mark.parametrize("form", BETAS)
def test_divergences_equal_those_of_trl(of_trl: Path, form: str) -> None:
    from safetensors.torch import load_file

    expected = load_file(of_trl / "divergences.safetensors")
    student, teacher = logits()
    student.requires_grad_()
    options = {"mix": BETAS["jsd"]} if form == "jsd" else {}
    total = kl.full(student, teacher, form=form, **options).sum()
    total.backward()
    torch.testing.assert_close(total.detach(), expected[form])
    torch.testing.assert_close(student.grad, expected[f"{form} gradient"])


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_equal_those_of_trl(pool: RankPool, of_trl: Path, loss: str) -> None:
    from safetensors.torch import load_file

    gradient = load_file(of_trl / f"{loss}.safetensors")
    expected = json.loads((of_trl / f"{loss}.json").read_text())["loss"]
    largest = max(value.abs().max().item() for value in gradient.values())
    seen: set[str] = set()
    losses = []
    for step, shards in pool.run(step_of, of_trl, loss, world_size=LAYOUT.world_size):
        if step:
            losses.append(step["loss"])
        for name, region, value in shards:
            worst = (value - gradient[name][region]).abs().max().item()
            assert worst <= 1e-5 * largest, (name, worst, largest)
            seen.add(name)
    assert losses
    assert losses == pytest.approx([expected] * len(losses), rel=1e-5)
    assert seen == set(gradient)
    assert largest > 0.1
