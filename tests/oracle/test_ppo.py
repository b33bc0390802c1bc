"""The oracle itself, against hand numbers, torch, and finite differences."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import advantages, normalisation
from tests.oracle.adam import Adam, AdamSettings
from tests.oracle.models import (
    Sample,
    causal_lm,
    headed_model,
    sequence_score,
    token_statistics,
    token_values,
)
from tests.oracle.ppo import (
    Experience,
    Settings,
    optimizer_step,
    policy_terms,
    ppo_iteration,
    value_terms,
)

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
SETTINGS = Settings(
    actor=AdamSettings(lr=1e-2),
    critic=AdamSettings(lr=1e-2),
    estimate=partial(advantages.gae, gamma=0.9, lam=0.8),
    normalise=normalisation.whiten,
    entropy_coef=0.01,
    kl_coef=0.1,
)


def random_state(model: nn.Module, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=random) * 0.3 for name, p in model.named_parameters()}


def language_model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in CONFIG.items() if name != "model_type"}
    shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **fields))
    return causal_lm(CONFIG, random_state(shapes, seed), dtype)


def value_model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    fields = {name: value for name, value in CONFIG.items() if name != "model_type"}
    shapes = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("qwen2", num_labels=1, **fields))
    return headed_model(CONFIG, random_state(shapes, seed), dtype)


SAMPLES = [
    Sample(sample_id="a", prompt_ids=[1, 2], response_ids=[3, 4, 5], score=1.0),
    Sample(sample_id="b", prompt_ids=[6], response_ids=[7], score=-2.0),
    Sample(sample_id="c", prompt_ids=[8, 9, 1], response_ids=[2, 2], score=0.5, finished=False),
]


def test_adam_is_torch_adamw_with_norm_clipping() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    theirs = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    theirs.load_state_dict(ours.state_dict())
    settings = AdamSettings(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, clip_grad=0.5)
    adam = Adam(ours, settings)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.8, 0.9),
        eps=1e-3,
    )
    for step in range(4):
        inputs = torch.full((2, 3), 0.5 + step, dtype=torch.float64)
        for model in (ours, theirs):
            model.zero_grad()
            (model(inputs) ** 2).sum().backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert adam.step() == pytest.approx(norm.item(), rel=1e-12)
        adamw.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_logprobs_and_values_are_read_before_the_token_and_scores_after_it() -> None:
    actor, critic = language_model(0), value_model(1)
    changed = Sample(sample_id="a", prompt_ids=[1, 2], response_ids=[3, 4, 6], score=1.0)
    entropies = [token_statistics(actor, s, 1.0)[1].tolist() for s in (SAMPLES[0], changed)]
    assert entropies[0] == entropies[1], "no token sees itself"
    assert token_values(critic, SAMPLES[0]).tolist() == token_values(critic, changed).tolist()
    assert sequence_score(critic, SAMPLES[0]) != sequence_score(critic, changed)
    earlier = Sample(sample_id="a", prompt_ids=[1, 2], response_ids=[5, 4, 5], score=1.0)
    same = token_values(critic, SAMPLES[0]) == token_values(critic, earlier)
    assert same.tolist() == [True, False, False], "each token sees those before it"


def test_ratios_of_the_first_step_are_one() -> None:
    actor, reference, critic = language_model(0), language_model(2), value_model(1)
    everyone = [[s.sample_id for s in SAMPLES]]
    outcome = ppo_iteration(actor, reference, critic, SAMPLES, everyone, SETTINGS)
    first = outcome.actor_steps[0]
    assert first.metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first.metrics["approxkl"] == pytest.approx(0.0, abs=1e-12)
    assert first.metrics["clipfrac"] == 0.0
    # whitened advantages have mean 0, so the loss is the entropy bonus alone
    assert first.loss == pytest.approx(-0.01 * first.metrics["entropy"], abs=1e-6)
    experience = outcome.experience
    gaps = [a for e in experience.values() for a in zip(e.returns, e.old_values, strict=True)]
    assert outcome.critic_steps[0].loss == pytest.approx(sum((r - v) ** 2 for r, v in gaps) / 2 / 6, rel=1e-5)
    drift = sum(a - b for a, b in zip(experience["a"].old_logprobs, experience["a"].ref_logprobs, strict=True))
    assert sum(experience["a"].rewards) == pytest.approx(1.0 - 0.1 * drift)
    assert torch.equal(actor.lm_head.weight, language_model(0).lm_head.weight), "the given model is not trained"
    assert not torch.equal(outcome.actor.lm_head.weight, actor.lm_head.weight)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_agree_with_finite_differences(role: str) -> None:
    """Some tokens are clipped and some are not; float64 but for the norms of the models, which limits the agreement."""
    if role == "actor":
        model, terms = language_model(0, torch.float64), policy_terms
        now = token_statistics(model, SAMPLES[0], 1.0)[0].tolist()
    else:
        model, terms = value_model(1, torch.float64), value_terms
        now = token_values(model, SAMPLES[0]).tolist()
    experience = Experience(
        old_logprobs=[now[0] - 0.5, now[1] + 0.1, now[2] - 0.1],  # ratios 1.65, 0.90, 1.11
        ref_logprobs=[],
        old_values=[now[0] - 0.5, now[1] + 0.1, now[2] - 0.1],
        rewards=[],
        advantages=[1.0, -0.5, 0.8],
        returns=[now[0] + 0.2, now[1] + 0.3, now[2] - 0.6],
        weights=[1.0] * 3,
    )
    members = [(SAMPLES[0], experience)]
    idle = Adam(model, AdamSettings(lr=0.0))
    step = optimizer_step(model, idle, members, terms, SETTINGS)
    assert step.metrics["clipfrac"] == pytest.approx(1 / 3)
    name = "lm_head.weight" if role == "actor" else "score.weight"
    parameter = dict(model.named_parameters())[name]
    for place in [(0, 0), (0, 5)]:
        losses = []
        for shift in (1e-4, -1e-4):
            with torch.no_grad():
                parameter[place] += shift
            losses.append(optimizer_step(model, idle, members, terms, SETTINGS).loss)
            with torch.no_grad():
                parameter[place] -= shift
        slope = (losses[0] - losses[1]) / 2e-4
        assert step.gradients[name][place].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)
    squares = sum(g.square().sum().item() for g in step.gradients.values())
    assert step.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-9)
