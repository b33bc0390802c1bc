"""The directory that a run writes."""

from __future__ import annotations

from pathlib import Path

from megarl.config import ConfigError, Problem, RunConfig, save

_CONFIG = "config.yaml"


class RunDirectory:
    """Where everything of a run lies; made anew, with the resolved configuration in it.

    Args:
        config: of the run.

    Raises:
        ConfigError: the directory holds a run already, or cannot be written.
    """

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.run.dir)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / _CONFIG).exists():
                raise _refused(config, "holds no run yet", "choose another run.dir, or move the old run away")
            save(config, self.path / _CONFIG)
        except OSError as error:
            raise _refused(config, f"can be written ({error.strerror})", "choose another run.dir") from None

    @property
    def metrics(self) -> Path:
        """A line of JSON per step."""
        return self.path / "metrics.jsonl"

    @property
    def updates(self) -> Path:
        """A line of JSON per optimizer step."""
        return self.path / "updates.jsonl"

    @property
    def evaluations(self) -> Path:
        """A line of JSON per evaluation."""
        return self.path / "evaluations.jsonl"

    @property
    def samples(self) -> Path:
        """A line of JSON per sample that is kept for reading."""
        return self.path / "samples.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's events."""
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        """What a finished run was, as JSON."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """Where a run goes on from, a directory per checkpoint."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face directory, when the run is finished."""
        return self.path / "export"

    @property
    def logs(self) -> Path:
        """What each process prints, a file per process."""
        return self.path / "logs"


def _refused(config: RunConfig, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem(field="run.dir", value=config.run.dir, rule=rule, fix=fix)])
