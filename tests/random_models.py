"""Random models that several runs start from: writing one is most of the CPU time of a short run's driver."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from megarl.config.inheritance import merged
from megarl.config.schema import RandomModel
from megarl.run.directory import write_random_model


def place_random_model(config: Path, *overrides: str) -> None:
    """Puts the model of a run where an earlier attempt would have written it, if it is a random one."""
    raw, _ = merged(config, overrides)
    directory = Path(raw["run"]["dir"]) / "model"
    if raw["model"].get("random") is not None and not directory.exists():
        model = RandomModel.model_validate(raw["model"]["random"])
        shutil.copytree(_written(model.model_dump_json()), directory)


@cache
def _written(model: str) -> Path:
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_random_model(RandomModel.model_validate_json(model), directory / "model")
    return directory / "model"
