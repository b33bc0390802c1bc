"""Rules of models: they exist, and share their tokens. `preflight.models` checks sizes and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.problems import Broken, correct_model_path
from megarl.config.schema import Critic, Model, Reference, Reward, read_hf_config
from megarl.decoder_fields import decoder_fields


def checkpoints_are_readable(field: str, start: Model | Reward | Critic | Reference) -> Iterator[Broken]:
    """Every checkpoint directory has a readable config.json."""
    paths: dict[str, str] = {}
    if isinstance(start, Reference):
        paths.update(start.directories)
    elif start.path is not None:
        paths[f"{field}.path"] = start.path
    for name, path in paths.items():
        yield from unreadable_config(name, path)


def unreadable_config(field: str, path: str) -> Iterator[Broken]:
    """Yields a problem unless a directory has a readable config.json."""
    try:
        read_hf_config(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        rule = f"a directory with a readable config.json ({reason})"
        yield field, rule, correct_model_path(path)


def checkpoints_share_the_tokens(
    model: Model, reward: Reward, critic: Critic | None, reference: Reference
) -> Iterator[Broken]:
    """The reward model, the critic and a teacher have every token id that the actor uses."""
    paths = {"reward.path": reward.path, "critic.path": None if critic is None else critic.path}
    paths.update(reference.directories)
    used = ids_in_use(model)
    for field, path in paths.items():
        if path is None:
            continue
        size = decoder_fields(_read(path) or {}).get("vocab_size")
        if used is None or not isinstance(size, int) or size >= used:
            continue
        rule = f"must know the {used} token ids in use; it has {size}"
        fix = (
            f"choose a checkpoint with the model's tokenizer, or set model.vocab_size to {size}"
            " if ids from there on stand for nothing"
        )
        yield field, rule, fix


def ids_in_use(model: Model) -> int | None:
    """Returns the number of token ids that may be sampled; None if it is unknown."""
    used = model.vocab_size or decoder_fields(readable_config(model) or {}).get("vocab_size")
    if isinstance(used, int):
        return used
    return None


def readable_config(model: Model) -> Mapping[str, Any] | None:
    """Returns the model's config.json; None if it cannot be read."""
    if model.random is not None and model.path is None:
        return model.random.config
    if model.path is not None and model.random is None:
        return _read(model.path)
    return None


def _read(path: str) -> Mapping[str, Any] | None:
    try:
        return read_hf_config(path)
    except (OSError, ValueError):
        return None  # reported by checkpoints_are_readable
