"""Models and samples of the naive programs: Hugging Face models, one sequence at a time.

- Log-probabilities and entropy are of softmax(logits / temperature) over the whole vocabulary, or over the ids of which
  the token was sampled, if they are known.
- The log-probability and the value of a response token are computed at the position before it.

Hugging Face computes norms and rotary angles in float32 whatever the dtype; the rest of a float64 model is float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response: its tokens, its score, whether the model ended it itself, and which prompt it answers.

    Args:
        score: None where nothing could score it.
        components: its scores by source, where an algorithm looks at each of them.
        greedy_score: of the greedy response to its prompt.
        rollout_logprobs: nats, one per response token, of whatever sampled it.
        versions: of the policy that sampled each response token.
        loss_mask: of each response id, whether the model sampled it; None where it sampled all. In a conversation the
            others were given; nothing but attention sees them.
        kept: the ids of which each response token was sampled; none where they are too many, and the token is not
            learned from. None where it was sampled of all.
    """

    sample_id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    score: float | None = 0.0
    finished: bool = True
    group: int = 0
    components: Sequence[float] = ()
    greedy_score: float = 0.0
    rollout_logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    loss_mask: Sequence[bool] | None = None
    kept: Sequence[Sequence[int]] | None = None

    @property
    def sampled(self) -> list[int]:
        """Where the sampled tokens are in the response."""
        return [t for t in range(len(self.response_ids)) if self.loss_mask is None or self.loss_mask[t]]


def causal_lm(config: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A language model from the fields of its HF configuration and its parameters by HF name."""
    return _model(AutoModelForCausalLM, config, state, dtype)


def headed_model(
    config: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A critic or reward model: a body with a linear head, ``score.weight`` [1, hidden]."""
    return _model(AutoModelForSequenceClassification, {**config, "num_labels": 1}, state, dtype)


def _model(factory: Any, config: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    fields = {name: value for name, value in config.items() if name not in ("model_type", "architectures", "dtype")}
    settings = AutoConfig.for_model(config["model_type"], **fields)
    model, found = type(factory.from_config(settings)).from_pretrained(
        None,
        config=settings,
        state_dict={name: tensor.clone() for name, tensor in state.items()},  # the model would keep the tensors
        attn_implementation="eager",
        dtype=dtype,
        output_loading_info=True,
    )
    tied = {"lm_head.weight"} if settings.tie_word_embeddings else set()
    assert found["missing_keys"] <= tied, f"parameters without a value: {found['missing_keys']}"
    assert found["unexpected_keys"] <= tied, f"values without a parameter: {found['unexpected_keys']}"
    return model.eval()


def token_logits(actor: nn.Module, sample: Sample) -> Tensor:
    """[R, V]: what predicts each response token."""
    return actor(input_ids=_tokens(sample)).logits[0][_source_positions(sample)]


def token_statistics(actor: nn.Module, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    """[R] nats: log-probability of each response token, and entropy of the distribution that it was drawn from."""
    logits = token_logits(actor, sample) / temperature
    chosen, entropies = [], []
    for i, t in enumerate(sample.sampled):
        token = sample.response_ids[t]
        ids = list(range(logits.shape[-1]))
        if sample.kept is not None:
            ids = list(sample.kept[i]) or [token]
        logprobs = torch.log_softmax(logits[i][ids], dim=-1)
        chosen.append(logprobs[ids.index(token)])
        entropies.append(-(logprobs.exp() * logprobs).sum())
    return torch.stack(chosen), torch.stack(entropies)


def token_values(critic: Any, sample: Sample) -> Tensor:
    """[R]: value of the state before each response token."""
    hidden = critic.base_model(input_ids=_tokens(sample)).last_hidden_state[0]
    return critic.score(hidden[_source_positions(sample)])[:, 0]


def sequence_score(reward: Any, sample: Sample) -> float:
    """The reward head's output at the last token."""
    hidden = reward.base_model(input_ids=_tokens(sample)).last_hidden_state[0]
    return reward.score(hidden[-1]).item()


def _tokens(sample: Sample) -> Tensor:
    return torch.tensor([[*sample.prompt_ids, *sample.response_ids]])


def _source_positions(sample: Sample) -> list[int]:
    return [len(sample.prompt_ids) + t - 1 for t in sample.sampled]
