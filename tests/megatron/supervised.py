"""Steps of fine-tuning and of the reward model with each of its losses: a job of the rank pool, and the naive ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algos.policy_loss import LossTerms
from megarl.config.schema import CustomFunction, Optimizer
from megarl.config.schema.training_sections import DIRECT_LOSSES, PREFERENCE_LOSSES
from megarl.data.batches import on_all_tokens, text_batch
from megarl.data.schedule import inference_schedule, step_schedule
from megarl.data.training_texts import TrainingText
from megarl.megatron.supervised_losses import DirectPreferenceLoss, PreferenceLoss, text_loss
from megarl.types import Layout, SampleInfo, TextChunk
from tests.megatron.compare import GRADIENT_STEP, adam_of, check, samples_of, state_of, trained
from tests.megatron.tiny import load_role, local_parts, random_head
from tests.oracle import models, ppo, supervised

SETTINGS = Optimizer(lr=1e-3, eps=1e-4, weight_decay=0.1, clip_grad=1.0)

Naive = tuple[list[ppo.Step], torch.nn.Module]
Batch = tuple[tuple[SampleInfo, ...], tuple[TextChunk, ...]]
Outcome = tuple[dict[str, float], dict[str, Any]]

PREFERENCES: dict[str, tuple[int, Any, Any]] = {
    # responses of a preference, the settings of the loss, and the naive one
    "pairwise": (2, PREFERENCE_LOSSES("pairwise", centering=0.05), supervised.pairwise(centering=0.05)),
    "margin": (2, PREFERENCE_LOSSES("pairwise", margin=True), supervised.pairwise()),
    "best_of_n": (3, PREFERENCE_LOSSES("best_of_n"), supervised.best_of_n),
    "span": (2, PREFERENCE_LOSSES("span"), supervised.span),
    "own": (
        2,
        CustomFunction(name="tests.megatron.supervised:own_loss", args={"weight": 0.3}),
        supervised.pairwise(centering=0.3),
    ),
}
"""The losses of the reward model."""

DIRECT: dict[str, tuple[Any, Any]] = {
    # the settings of the loss, and the naive one
    "dpo": (DIRECT_LOSSES("dpo", beta=0.3), supervised.dpo(0.3)),
    "smoothed": (DIRECT_LOSSES("dpo", beta=0.3, label_smoothing=0.2), supervised.dpo(0.3, 0.2)),
    "hinge": (DIRECT_LOSSES("hinge", beta=0.3), supervised.hinge(0.3)),
    "ipo": (DIRECT_LOSSES("ipo", beta=0.3), supervised.ipo(0.3, per_token=True)),
    "ipo sums": (DIRECT_LOSSES("ipo", beta=0.3, per_token=False), supervised.ipo(0.3, per_token=False)),
    "simpo": (DIRECT_LOSSES("simpo", beta=2.5, gamma=0.5), supervised.simpo(2.5, 0.5)),
    "orpo": (DIRECT_LOSSES("orpo", beta=0.5), supervised.orpo(0.5)),
    "cpo": (DIRECT_LOSSES("cpo", beta=0.2, alpha=0.7), supervised.cpo(0.2, 0.7)),
    "kto": (DIRECT_LOSSES("kto", beta=0.3, desirable_weight=1.2, undesirable_weight=0.8), None),
}
"""The losses of the actor on preferences; its others are ``sft`` and ``all tokens``, which trains on prompts, too."""


KL = 0.4
"""The divergence that batches have, for KTO."""


def own_loss(chosen: torch.Tensor, rejected: torch.Tensor, *, weight: float) -> Any:
    """A loss of the user's own."""
    values = torch.log1p(torch.exp(rejected - chosen)) + weight * (chosen + rejected).square()
    scores = {"chosen": chosen.detach(), "rejected": rejected.detach(), "margin": (chosen - rejected).detach()}
    return LossTerms(values=values, metrics={"accuracy": (chosen > rejected).float(), **scores})


def batches(responses: int = 2) -> list[Batch]:
    """Two steps of four and of three preferences of random tokens.

    Responses begin with the same tokens, and one may be the other's beginning.
    """
    random = np.random.default_rng(0)

    def ids(length: int) -> Any:
        return random.integers(100, size=length).astype(np.int32)

    rows = []
    for index in range(7):
        prompt, shared = ids(random.integers(1, 8)), ids(random.integers(0, 5))
        ends = [ids(length) for length in random.permutation(9)[:responses]]
        answers = tuple(np.concatenate([shared, end]) if len(shared) + len(end) else ids(1) for end in ends)
        text = TrainingText(key=str(index), prompt_ids=prompt, responses=answers, margin=float(random.normal()))
        if responses == 1:
            text = replace(text, desirable=index % 3 > 0)
        rows.append(text)
    return [_referenced(*text_batch(part, 4), random) for part in (rows[:4], rows[4:])]


def _referenced(samples: Any, chunks: Any, random: np.random.Generator) -> Batch:
    """The batch with log-probabilities of its responses under a reference, about those of equal chances."""
    referenced = []
    for chunk in chunks:
        lengths = np.array([len(row) for row in chunk.response_ids])
        values = -np.log(100) * lengths + 2 * random.normal(size=len(lengths))
        referenced.append(replace(chunk, ref_logprobs=values.astype(np.float32), kl=KL))
    return samples, tuple(referenced)


def make_loss(role: Any, loss: str, chunks: Any) -> Any:
    if loss in PREFERENCES:
        return partial(PreferenceLoss, role, PREFERENCES[loss][1], chunks)
    if loss in DIRECT:
        return partial(DirectPreferenceLoss, role, DIRECT[loss][0], chunks)
    return partial(text_loss, role)


def two_steps(
    rank: int,
    directory: Path,
    loss: str,
    layout: Layout,
    budget: int,
    adapters: Any = None,
    recompute: str = "none",
    *,
    gradients: bool = False,
) -> Outcome:
    """The loss before the first step, by a forward pass alone; and both steps.

    Args:
        adapters: the ``Adapters`` and their canonical tensors.
        gradients: whether to take the first step alone, a ``GRADIENT_STEP``.
    """
    if loss in PREFERENCES:
        name, head, responses = "reward", random_head(directory), PREFERENCES[loss][0]
    else:
        name, head, responses = "actor", None, 2 if loss in DIRECT and loss != "kto" else 1
    role = load_role(
        directory, name, layout, rank, trainable=True, head=head, recompute=recompute, adapters=adapters and adapters[0]
    )
    if adapters is not None:
        role.load_adapters(local_parts(role.saved_map(rank), adapters[1]))
    role.start_training(GRADIENT_STEP if gradients else SETTINGS, total_steps=2)
    before, steps = None, []
    data = batches(1 if loss == "kto" else max(responses, 2))
    for samples, chunks in data[:1] if gradients else data:
        rows = on_all_tokens(samples) if loss == "all tokens" else samples
        plan = step_schedule(rows, layout, budget, rows_per_unit=responses).ranks[role.coords.dp]
        making = make_loss(role, loss, chunks)
        if before is None:
            before = role.evaluate(plan, chunks, making)
        steps += role.update([plan], chunks, making)
    return before, trained(role, steps)


def naive_steps(
    directory: Path,
    loss: str,
    changed: Callable[[Any], Any] = lambda model: model,
    *,
    gradients: bool = False,
) -> Naive:
    """The same of a model in a directory by the naive program; with ``all tokens``, the first is the prompt.

    Args:
        changed: what is done to the model before the first step.
        gradients: whether to take the first step alone, a ``GRADIENT_STEP``.
    """
    config = json.loads((directory / "config.json").read_text())
    if loss == "kto":
        return naive_kto(directory)
    responses, _, naive_loss = PREFERENCES.get(loss, (2, None, DIRECT.get(loss, (None, None))[1]))
    settings = adam_of(GRADIENT_STEP if gradients else SETTINGS)
    steps: list[Any] = []
    data = batches(responses)
    for samples, chunks in data[:1] if gradients else data:
        rows = samples_of(list(chunks), list(samples))
        if loss == "all tokens":
            texts = [[*row.prompt_ids, *row.response_ids] for row in rows]
            rows = [models.Sample(sample_id="", prompt_ids=text[:1], response_ids=text[1:]) for text in texts]
        if naive_loss is None:
            steps.append(rows)
            continue
        margins = [float(chunks[info.chunk].margins[info.row]) for info in samples]  # pyright: ignore[reportOptionalSubscript]
        reference = [float(chunks[info.chunk].ref_logprobs[info.row]) for info in samples]  # pyright: ignore[reportOptionalSubscript]
        preferences = []
        for start in range(0, len(rows), responses):
            end = start + responses
            margin = margins[start] if loss == "margin" else 0.0
            one = supervised.Preference(responses=rows[start:end], margin=margin, reference=reference[start:end])
            preferences.append(one)
        steps.append(preferences)
    if naive_loss is None:
        actor = changed(models.causal_lm(config, state_of(directory)))
        return supervised.fine_tune(actor, steps, settings)
    if loss in DIRECT:
        actor = changed(models.causal_lm(config, state_of(directory)))
        return supervised.train_directly(actor, steps, settings, naive_loss)
    reward = changed(models.headed_model(config, headed_state(directory)))
    return supervised.train_reward(reward, steps, settings, naive_loss)


def naive_kto(directory: Path) -> Naive:
    """The steps of single responses, of which the batches say whether they are desirable."""
    steps: list[Any] = []
    for samples, chunks in batches(1):
        rows = []
        for info, row in zip(samples, samples_of(list(chunks), list(samples)), strict=True):
            chunk: Any = chunks[info.chunk]
            under = [float(chunk.ref_logprobs[info.row])]
            rows.append(
                supervised.Preference(responses=[row], reference=under, desirable=bool(chunk.desirable[info.row]))
            )
        steps.append(rows)
    actor = models.causal_lm(json.loads((directory / "config.json").read_text()), state_of(directory))
    return supervised.train_on_rated(actor, steps, adam_of(SETTINGS), beta=0.3, weights=(1.2, 0.8), kl=KL)


def headed_state(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of the model in a directory, with a head in place of its output layer."""
    body = {name: tensor for name, tensor in state_of(directory).items() if name != "lm_head.weight"}
    return {**body, "score.weight": random_head(directory)}


def check_steps(results: list[Outcome], naive: Naive, start: dict[str, torch.Tensor]) -> None:
    """All ranks against the naive steps, from the same start."""
    check([rank for _, rank in results], *naive, start)
    for before, rank in results:
        if rank["reports"]:
            first = {name: rank["steps"][0][name] for name in before}
            assert before == pytest.approx(first, rel=1e-6), "a forward pass tells what the step tells"


def scaled(rank: int, directory: Path, layout: Layout, dtype: torch.dtype) -> list[Any]:
    """Scores before the head is scaled by 3, after it, and after an optimizer step that moves nothing."""
    head = random_head(directory)
    role = load_role(directory, "reward", layout, rank, trainable=True, head=head, dtype=dtype)
    role.start_training(SETTINGS.model_copy(update={"lr": 1e-30, "weight_decay": 0.0}), total_steps=1)
    samples, chunks = batches()[0]
    inference = inference_schedule(samples, layout, 40).ranks[role.coords.dp]
    found = [role.scores(inference, chunks)]
    role.scale_head(3.0)
    found.append(role.scores(inference, chunks))
    step = step_schedule(samples, layout, 40, rows_per_unit=2).ranks[role.coords.dp]
    role.update([step], chunks, make_loss(role, "span", chunks))
    return [*found, role.scores(inference, chunks)]
