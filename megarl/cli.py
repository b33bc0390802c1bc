"""The command line `megarl`: init, train, profile, eval, launch, status, stacks, view and so on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import megarl
from megarl.convert.cli import app as convert
from megarl.errors import UsageError
from megarl.garbage_collection import importing
from megarl.launch.cli import app as launchers
from megarl.plan.cli import ConfigCommand
from megarl.plan.cli import app as plans
from megarl.texts import escape_output, printable

if TYPE_CHECKING:
    from megarl.config import RunConfig, TrainingConfig

app = typer.Typer(
    name="megarl",
    help="Reinforcement learning of language models with Megatron-core trainers and vLLM rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megarl {megarl.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of `megarl` itself."""


app.add_typer(convert)
app.add_typer(plans)
app.add_typer(launchers)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY.PATH=VALUE", help="Settings to override.")]
RunDirs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN_DIR...", help="Directories of runs, or those above them."),
]


@app.command("init")
def init(
    name: Annotated[str, typer.Argument(help="Name of the run and of its files.")] = "mine",
    *,
    model: Annotated[str, typer.Option(help="Hugging Face directory of the model.")] = "",
    prompts: Annotated[str, typer.Option(help="JSONL file of the prompts.")] = "",
    recipe: Annotated[str, typer.Option("--from", help="Recipe, such as grpo or dapo: docs/recipes.md.")] = "grpo",
    steps: Annotated[int, typer.Option(help="Steps of the run.")] = 100,
) -> None:
    """Write a new run: NAME.yaml with comments, and a reward function with a test.

    Asks for model and prompts if they are not given.
    """
    try:
        model = model or typer.prompt("Model")
        prompts = prompts or typer.prompt("Prompts")
    except typer.Abort:
        _stop(UsageError("\nmegarl init: no answer; give --model DIR and --prompts FILE"), code=2)
    with importing():
        from megarl.config import ConfigError
        from megarl.init import NewRun

    run = NewRun(name=name, recipe=recipe, model=model, prompts=prompts, steps=steps)
    try:
        run.write()
    except ConfigError as error:
        _stop(error, code=2)
    config, function, test = run.files
    typer.echo(f"{config}    the configuration")
    typer.echo(f"{function}    the reward of a response: make it yours")
    typer.echo(f"{test}    its test")
    typer.echo(f"Next:\n  python -m pytest {test}\n  megarl plan {config}\n  megarl train {config}")


@app.command(cls=ConfigCommand)
def train(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Train as CONFIG describes: SFT, a reward model, or PPO and its kin; resume from the checkpoint in run.dir."""
    config = _load(config_path, overrides)
    _show_imports()
    with importing():
        from megarl.loop import train

    with _exit_codes(config_path):
        train.train_with_restarts(_training(config))


@app.command("profile", cls=ConfigCommand)
def profile_steps(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Train a few steps of CONFIG in RUN_DIR-profile with torch's profiler, and print the longest kernels of each call.

    The steps, ranks and engines are those of `profile`. Nothing is evaluated or saved, and a second
    call starts again.
    """
    _show_imports()
    from megarl.config import load
    from megarl.loop import train

    given = overrides or []
    with _exit_codes(config_path):
        config = _training(load(config_path, given))
        changes = [
            f"run.dir={Path(config.run.dir)}-profile",
            "tracking.wandb_project=null",
            "tracking.mlflow_experiment=null",
            "tracking.trackio_project=null",
        ]
        if config.profile is None:
            changes.append("profile={}")
        if config.engine_settings is not None:
            changes.append("rollout.record=null")
        train.profile(_training(load(config_path, [*given, *changes])))


@app.command("eval", cls=ConfigCommand)
def evaluate(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Evaluate CONFIG's model, any Hugging Face directory: answer held-out prompts, and report the scores."""
    config = _load(config_path, overrides)
    _show_imports()
    with importing():
        from megarl.config import ConfigError, Problem, TrainingConfig
        from megarl.stages.eval import trainer

    with _exit_codes(config_path):
        if isinstance(config, TrainingConfig):
            fix = "write a configuration of stage eval (docs/evaluation.md), or use megarl train, which evaluates, too"
            raise ConfigError([Problem(field="stage", value=config.stage, rule="the stage eval", fix=fix)])
        trainer.evaluate(config)


@app.command()
def status(
    run_dirs: RunDirs,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, an object a line a run.")] = False,
) -> None:
    """Show the state of runs: steps, pace, last error, checkpoints, logs. Reads only their directories."""
    from megarl.dashboard.status.show import show_status

    with _reading():
        show_status(run_dirs, as_json=as_json)


@app.command()
def view(
    run_dirs: RunDirs,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 is a free one.")] = 0,
    export_to: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", dir_okay=False, help="Write an HTML file, and end."),
    ] = None,
) -> None:
    """Show runs on a page: curves, samples, held-out answers, timeline, settings; live while they train."""
    from megarl.dashboard.status.reading import find_runs
    from megarl.dashboard.view.page_export import export
    from megarl.dashboard.view.page_server import PageServer
    from megarl.dashboard.view.run_view import open_runs
    from megarl.files import format_bytes

    with _reading():
        if export_to is not None and not os.access(export_to.absolute().parent, os.W_OK | os.X_OK):
            raise UsageError(f"--export: {export_to.parent} must be a writable directory; make it, or choose another")
        runs: list[Path] = []
        for directory in run_dirs:
            runs += find_runs(directory)
        views = open_runs(runs)
        if export_to is not None:
            export(views, export_to)
            typer.echo(f"wrote {export_to} ({format_bytes(export_to.stat().st_size)}, self-contained)")
            return
    try:
        server = PageServer(views, port)
    except OSError as error:
        _stop(OSError(f"port {port}: {error.strerror}"), code=1)
    typer.echo(f"{server.url}\nfor a browser on this machine, until Ctrl-C")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN [STEP STEP] | RUN RUN", help="Runs, or steps of a run.")],
) -> None:
    """Compare two evaluations prompt by prompt: a run's first and last, those after two steps, or two runs' last."""
    from megarl.dashboard.compare import compare as compare_runs

    with _reading():
        compare_runs(runs)


@app.command()
def stacks(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run that is running.")]) -> None:
    """Write the stacks of a run's processes into its directory, and print what they wait for; the run continues."""
    from megarl.dashboard.status.reading import require_run
    from megarl.run.live_stacks import show_stacks

    with _reading(), _exit_codes(run):
        if not (run / "logs").is_dir():
            require_run(run)
        show_stacks(run)


@plans.command("config", cls=ConfigCommand)
def plan(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Check CONFIG and print its placement, batches, algorithm and memory, without starting anything.

    Of a model, config.json and the tokenizer's files are enough.
    """
    config = _load(config_path, overrides, bare=True)
    from megarl.plan.run_plan import print_memory, print_plan
    from megarl.preflight.check import check, check_login
    from megarl.preflight.device_memory import check_memory
    from megarl.preflight.epochs import with_steps
    from megarl.preflight.trial_calls import call_functions
    from megarl.run.resume import describe_run

    with _exit_codes(config_path):
        sets = check(config, bare=True)
        config = with_steps(config, sets)
        check_login(config.tracking)
        resume = describe_run(config)
        first_prompt = call_functions(config, sets)
        check_memory(config)
    print_plan(config, sets, resume, first_prompt=first_prompt)
    print_memory(config)


@plans.command("memory")
def memory(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Print the memory of each device in each phase of CONFIG; of models and data, only config.json files are read."""
    from megarl.config import load
    from megarl.plan.run_plan import print_memory
    from megarl.preflight.device_memory import check_memory
    from megarl.preflight.epochs import with_steps

    with _exit_codes(config_path):
        config = with_steps(load(config_path, overrides or []))
        print_memory(config)
        check_memory(config)


@app.command("check-model")
def check_model(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face directory; config.json is enough.")],
    workspace: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="New directory for the small model and its runs.")
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object a line, one for each check.")] = False,
) -> None:
    """Compare what is computed for a model with transformers and vLLM, on a small copy of it.

    Takes one to three minutes on two cores, and needs no GPU.
    """
    with importing():
        from megarl.model_check.check_report import report

    with _reading():
        passed = report(model, workspace, as_json=as_json)
    if not passed:
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Check the environment: versions, devices and accelerations, with fixes."""
    from megarl.doctor import examine, print_report

    findings = examine()
    print_report(findings)
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)


def _training(config: RunConfig) -> TrainingConfig:
    from megarl.config import ConfigError, Problem, TrainingConfig

    if not isinstance(config, TrainingConfig):
        problem = Problem(field="stage", value=config.stage, rule="a stage that trains", fix="use megarl eval")
        raise ConfigError([problem])
    return config


def _show_imports() -> None:
    from megarl.run.display import phase_line
    from megarl.run.timers import process_age

    typer.echo(phase_line("imports", process_age()))


def _load(path: Path, overrides: list[str] | None, *, bare: bool = False) -> RunConfig:
    with importing(), _exit_codes(path):  # the check of models imports more
        from megarl.config import load
        from megarl.preflight.check import check

        return load(path, overrides or [], partial(check, bare=bare))


@contextmanager
def _exit_codes(path: Path) -> Iterator[None]:
    """Ends the command with an error's message; exit code 2 for a mistake in the file, 1 for a failed run."""
    from megarl.config import ConfigError
    from megarl.errors import PreemptedError, RunError

    try:
        yield
    except ConfigError as error:
        _stop(ConfigError(error.problems, str(path), error.unchecked), code=2)
    except RunError as error:
        _stop(error, code=1)
    except PreemptedError as error:
        _stop(error, code=error.exit_code)


@contextmanager
def _reading() -> Iterator[None]:
    """Ends a command that reads runs with an error's message; exit code 2 for its arguments, 1 for a run's files."""
    try:
        yield
    except UsageError as error:
        _stop(error, code=2)
    except OSError as error:
        _stop(OSError(f"{error.filename}: {error.strerror}"), code=1)


def _stop(error: Exception, *, code: int) -> NoReturn:
    typer.echo(printable(str(error)), err=True)
    raise typer.Exit(code) from None


def main() -> None:
    """The entry point of the `megarl` command."""
    escape_output()
    app()
