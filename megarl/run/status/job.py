"""A start of a Slurm job of a run, and what there is to say of it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.run.attempts import Attempt
from megarl.run.status.words import ago


@dataclass(frozen=True, kw_only=True)
class JobStage:
    """Something that the job has come to.

    Args:
        stage: what it is.
        time: seconds since 1970.
    """

    stage: str
    time: float


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How the job ended, as its head tells it.

    Args:
        time: seconds since 1970.
        exit_code: of the job; 128 and the number of the signal that ended it.
        reason: in words.
        node: at fault, if one is.
    """

    time: float
    exit_code: int
    reason: str
    node: str | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A start of a job.

    Args:
        id: Slurm's number.
        restart: how often Slurm had started it before.
        output: file with what it printed, if it is there.
        printed: the last lines of it, while no agent has begun.
        directory: of its logs; None while no agent has begun.
        logs: names of the files in it.
        attach: command that opens a shell in the job; None where there is none.
        began: seconds since 1970; while no agent has begun, when the job printed last.
        stages: that it has come to.
        end: None while it lasts, and where its head was killed.
    """

    id: str
    restart: int = 0
    output: str | None
    printed: tuple[str, ...] = ()
    directory: str | None = None
    logs: tuple[str, ...] = ()
    attach: str | None = None
    began: float
    stages: tuple[JobStage, ...] = ()
    end: JobEnd | None = None

    @property
    def last_sign(self) -> float:
        """When it told of itself last."""
        return self.end.time if self.end is not None else max([self.began, *(stage.time for stage in self.stages)])

    @property
    def message(self) -> str:
        """What it says of its end, or of what it does before an agent begins."""
        return self.end.reason if self.end is not None else "\n".join(self.printed)

    def news(self, now: float) -> str:
        """The last that is known of it."""
        if self.end is not None:
            return f"job {self.id} has ended with exit code {self.end.exit_code}"
        if self.directory is None:
            known = f"it printed this {ago(self.began, now)}" if self.printed else f"it began {ago(self.began, now)}"
            return f"job {self.id}: {known}, and nothing else is known; squeue --job {self.id} says whether it goes on"
        known = f"{self.stages[-1].stage} {ago(self.last_sign, now)}" if self.stages else "nothing is known of it yet"
        return f"job {self.id}: {known}"

    def has(self, attempt: Attempt) -> bool:
        """Whether it is the job of an attempt."""
        return (attempt.job, attempt.restart) == (self.id, self.restart)

    def follows(self, attempt: Attempt) -> bool:
        """Whether it was started after an attempt of another one."""
        return self.began > attempt.time and not self.has(attempt)

    def outlasts(self, attempt: Attempt, written: float) -> bool:
        """Whether the attempt has told nothing since it did; else it waits for the run, or was refused because of it.

        Args:
            attempt: which it follows.
            written: when the run was written last, seconds since 1970.
        """
        return max(written, attempt.end.time if attempt.end else 0.0) <= self.last_sign
