"""Which model a checkpoint is of, and the files that go beside its weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, PPOConfig, load
from megarl.convert.errors import UsageError
from megarl.convert.hf import read_spec
from megarl.convert.locating import HF_FILES, Checkpoint
from megarl.models import ModelSpec, model_spec
from megarl.types import HeadName
from megarl.weights.export import copy_side_files, write_json

_CONFIG = "config.yaml"
_HF_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model of a checkpoint.

    Args:
        spec: of its architecture.
        head: what it has on top.
        sides: directories with tokenizer and generation files; the later ones' go before.
    """

    spec: ModelSpec
    head: HeadName
    sides: tuple[Path, ...]

    def write_sides(self, directory: Path, dtype: str) -> None:
        """Writes everything but the weights of an HF directory."""
        for source in self.sides:
            copy_side_files(source, directory)
        write_json(directory / _HF_CONFIG, replace(self.spec, dtype=dtype).hf_config(self.head))


def model_of(checkpoint: Checkpoint, template: Path | None) -> Model:
    """The model of a checkpoint, by a template, or by what lies beside the checkpoint.

    Args:
        template: an HF directory of the same architecture.

    Raises:
        UsageError: nothing says which model it is.
    """
    if template is not None:
        spec, sides = read_spec(template), (template,)
    elif checkpoint.kind == "megarl":
        spec, sides = _of_run(checkpoint)
    elif (checkpoint.root / HF_FILES / _HF_CONFIG).is_file():
        spec, sides = read_spec(checkpoint.root / HF_FILES), (checkpoint.root / HF_FILES,)
    else:
        raise UsageError(
            f"{checkpoint.root} does not say which model it is of; name a directory that has its config.json and "
            "tokenizer with --hf"
        )
    return Model(spec=spec, head=checkpoint.head(spec.head), sides=sides)


def keep_sides(source: Path, root: Path) -> None:
    """Keeps what an import needs to become an HF directory again."""
    directory = root / HF_FILES
    directory.mkdir(exist_ok=True)
    copy_side_files(source, directory)
    shutil.copyfile(source / _HF_CONFIG, directory / _HF_CONFIG)


def _of_run(checkpoint: Checkpoint) -> tuple[ModelSpec, tuple[Path, ...]]:
    """What a run's configuration says of the model that a role began as."""
    try:
        config = load(checkpoint.root / _CONFIG)
        own: str | None = None
        if isinstance(config, PPOConfig) and checkpoint.role == "critic" and config.critic is not None:
            own = config.critic.path
        fields: Mapping[str, Any] = config.model.hf_config()
        spec = model_spec(fields) if own is None else read_spec(Path(own))
    except (ConfigError, OSError, ValueError) as error:
        raise UsageError(
            f"{checkpoint.root / _CONFIG} does not lead to the model's config.json ({error}); name a directory that "
            "has it with --hf"
        ) from None
    named = (config.model.path, config.model.tokenizer, own)
    return spec, tuple(Path(path) for path in named if path is not None)
