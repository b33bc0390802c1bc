"""The command line: ``megarl train | eval | plan | convert | doctor``.

A mistake of the user is one message, with exit code 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from megarl.convert.cli import app as convert
from megarl.plan.cli import app as plans

if TYPE_CHECKING:
    from megarl.config import RunConfig

app = typer.Typer(
    name="megarl",
    help="Reinforcement learning of language models with Megatron-core trainers and vLLM rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(convert)
app.add_typer(plans)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings to override.")]


@app.command()
def train(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Train as CONFIG describes: SFT, a reward model, PPO or RAFT; go on where run.dir has a checkpoint."""
    config = _load(config_path, overrides)
    from megarl.config import ConfigError, Problem, TrainingConfig
    from megarl.errors import RunError
    from megarl.loop import run

    if not isinstance(config, TrainingConfig):
        problem = Problem(field="stage", value=config.stage, rule="a stage that trains", fix="use megarl eval")
        _stop(ConfigError([problem], str(config_path)), exit_code=2)
    try:
        run.train(config)
    except ConfigError as error:
        _stop(ConfigError(error.problems, str(config_path)), exit_code=2)
    except RunError as error:
        _stop(error, exit_code=1)


@app.command("eval")
def evaluate(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Let the model that CONFIG names, any Hugging Face directory, answer held-out prompts, and report the scores."""
    config = _load(config_path, overrides)
    from megarl.config import ConfigError, EvalConfig, Problem
    from megarl.errors import RunError
    from megarl.loop import eval as evaluation

    if not isinstance(config, EvalConfig):
        problem = Problem(field="stage", value=config.stage, rule="the stage eval", fix="use megarl train")
        _stop(ConfigError([problem], str(config_path)), exit_code=2)
    try:
        evaluation.evaluate(config)
    except ConfigError as error:
        _stop(ConfigError(error.problems, str(config_path)), exit_code=2)
    except RunError as error:
        _stop(error, exit_code=1)


@plans.command("config")
def plan(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Check CONFIG and print what it would run where, without starting anything."""
    config = _load(config_path, overrides)
    from megarl.config import ConfigError
    from megarl.loop.preflight import check
    from megarl.plan import print_plan

    try:
        check(config)
    except ConfigError as error:
        _stop(ConfigError(error.problems, str(config_path)), exit_code=2)
    print_plan(config)


@app.command()
def doctor() -> None:
    """Check the environment: versions, devices, accelerations, and the fix for what is missing."""
    from megarl.doctor import examine, print_report

    findings = examine()
    print_report(findings)
    if any(finding.broken for finding in findings):
        raise typer.Exit(1)


def _load(path: Path, overrides: list[str] | None) -> RunConfig:
    from megarl.config import ConfigError, load
    from megarl.loop import preflight

    try:
        return load(path, overrides or [], preflight.problems)
    except ConfigError as error:
        _stop(error, exit_code=2)


def _stop(error: Exception, *, exit_code: int) -> NoReturn:
    """Ends the command with the error's own message, which says all that a traceback could."""
    typer.echo(str(error), err=True)
    raise typer.Exit(exit_code) from None


def main() -> None:
    """The entry point of the ``megarl`` command."""
    app()
