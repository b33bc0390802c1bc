"""Steps of the reward model by each of its losses, and of fine-tuning on all tokens: jobs of the rank pool."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.data.batches import on_all_tokens, text_batch
from megarl.data.schedule import step_schedule
from megarl.data.training_texts import TrainingText
from megarl.types import Layout, SampleInfo, TextChunk
from tests.megatron.compare import adam_of, samples_of, state_of, trained
from tests.megatron.supervised import SETTINGS, Naive, headed_state, sft
from tests.megatron.tiny import load_role, random_head
from tests.oracle import models, supervised

Batch = tuple[tuple[SampleInfo, ...], tuple[TextChunk, ...]]

LOSSES: dict[str, tuple[int, Any]] = {
    # by name: responses of a preference, and the naive loss
    "margin": (2, supervised.pairwise()),
    "best_of_n": (3, supervised.best_of_n),
    "span": (2, supervised.span),
    "own": (2, supervised.pairwise(centering=0.3)),
}


def own_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, weight: float) -> Any:
    """A loss of the user's own."""
    from megarl.algos.policy_loss import LossTerms

    values = torch.log1p(torch.exp(rejected - chosen)) + weight * (chosen + rejected).square()
    scores = {"chosen": chosen.detach(), "rejected": rejected.detach(), "margin": (chosen - rejected).detach()}
    return LossTerms(values=values, metrics={"accuracy": (chosen > rejected).float(), **scores})


def preferences(responses: int, count: int = 7) -> list[TrainingText]:
    """Of random tokens; responses begin with the same tokens, and one may be the other's beginning."""
    random = np.random.default_rng(0)

    def ids(length: int) -> Any:
        return random.integers(100, size=length).astype(np.int32)

    made = []
    for index in range(count):
        prompt, shared = ids(random.integers(1, 8)), ids(random.integers(0, 5))
        ends = [ids(length) for length in random.permutation(9)[:responses]]
        answers = tuple(np.concatenate([shared, end]) if len(shared) + len(end) else ids(1) for end in ends)
        made.append(TrainingText(key=str(index), prompt_ids=prompt, responses=answers, margin=float(random.normal())))
    return made


def batches(responses: int) -> list[Batch]:
    """Two steps."""
    rows = preferences(responses)
    return [text_batch(part, 4) for part in (rows[:4], rows[4:])]


def settings_of(name: str) -> Any:
    from megarl.config.schema import CustomFunction
    from megarl.config.schema.training_sections import PREFERENCE_LOSSES

    return {
        "margin": PREFERENCE_LOSSES("pairwise", margin=True),
        "best_of_n": PREFERENCE_LOSSES("best_of_n"),
        "span": PREFERENCE_LOSSES("span"),
        "own": CustomFunction(name="tests.megatron.preferences:own_loss", args={"weight": 0.3}),
    }[name]


def compared(rank: int, directory: Path, name: str, layout: Layout, budget: int) -> dict[str, Any]:
    """Two steps of the reward model with the loss of that name."""
    from megarl.megatron.parallel import GroupCache
    from megarl.megatron.supervised_losses import PreferenceLoss

    responses, _ = LOSSES[name]
    role = load_role(directory, "reward", layout, rank, GroupCache(), trainable=True, head=random_head(directory))
    role.start_training(SETTINGS, total_steps=2)
    steps = []
    for samples, chunks in batches(responses):
        plan = step_schedule(samples, layout, budget, rows_per_unit=responses)
        steps += role.update(
            [plan.ranks[role.coords.dp]], chunks, partial(PreferenceLoss, role, settings_of(name), chunks)
        )
    return trained(role, steps)


def naively_compared(directory: Path, name: str) -> Naive:
    """The naive steps on the same preferences."""
    responses, loss_of = LOSSES[name]
    steps = []
    for samples, chunks in batches(responses):
        rows = samples_of(list(chunks), list(samples))
        margins = [float(chunks[info.chunk].margins[info.row]) for info in samples]  # pyright: ignore[reportOptionalSubscript]
        steps.append(
            [
                supervised.Preference(
                    responses=rows[start : start + responses], margin=margins[start] if name == "margin" else 0.0
                )
                for start in range(0, len(rows), responses)
            ]
        )
    config = json.loads((directory / "config.json").read_text())
    reward = models.headed_model(config, headed_state(directory))
    return supervised.train_reward(reward, steps, adam_of(SETTINGS), loss_of)


def tuned_on_all(rank: int, directory: Path, layout: Layout, budget: int) -> dict[str, Any]:
    """Two steps of fine-tuning on every token of the first responses."""
    from megarl.megatron.parallel import GroupCache

    role = load_role(directory, "actor", layout, rank, GroupCache(), trainable=True, head=None)
    role.start_training(SETTINGS, total_steps=2)
    steps = []
    for samples, chunks in batches(2):
        plan = step_schedule(on_all_tokens(samples), layout, budget)
        steps += role.update([plan.ranks[role.coords.dp]], chunks, sft(role))
    return trained(role, steps)


def naively_tuned_on_all(directory: Path) -> Naive:
    """The naive steps, to which the first token is the prompt."""
    whole = []
    for samples, chunks in batches(2):
        texts = [[*row.prompt_ids, *row.response_ids] for row in samples_of(list(chunks), list(samples))]
        whole.append(
            [
                models.Sample(sample_id=info.sample_id, prompt_ids=text[:1], response_ids=text[1:])
                for info, text in zip(samples, texts, strict=True)
            ]
        )
    config = json.loads((directory / "config.json").read_text())
    return supervised.fine_tune(models.causal_lm(config, state_of(directory)), whole, adam_of(SETTINGS))


def scaled(rank: int, directory: Path, layout: Layout, dtype: torch.dtype) -> list[Any]:
    """Scores before the head is scaled by 3, after it, and after an optimizer step that moves nothing."""
    from megarl.data.schedule import inference_schedule
    from megarl.megatron.parallel import GroupCache
    from megarl.megatron.supervised_losses import PreferenceLoss

    head = random_head(directory)
    role = load_role(directory, "reward", layout, rank, GroupCache(), trainable=True, head=head, dtype=dtype)
    role.start_training(SETTINGS.model_copy(update={"lr": 1e-30, "weight_decay": 0.0}), total_steps=1)
    samples, chunks = batches(2)[0]
    inference = inference_schedule(samples, layout, 40).ranks[role.coords.dp]
    told = [role.scores(inference, chunks)]
    role.scale_head(3.0)
    told.append(role.scores(inference, chunks))
    step = step_schedule(samples, layout, 40, rows_per_unit=2).ranks[role.coords.dp]
    role.update([step], chunks, partial(PreferenceLoss, role, settings_of("span"), chunks))
    return [*told, role.scores(inference, chunks)]
