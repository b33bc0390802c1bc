"""A run directory is resumed from its latest checkpoint, and only with a matching configuration."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import ConfigError, RunConfig, load
from megarl.run.directory import RunDirectory
from tests.run.staging import content, save, write_roles

DEBUG = Path(__file__).parents[2] / "configs" / "debug" / "ppo.yaml"


def debug(run: Path, *overrides: str) -> RunConfig:
    return load(DEBUG, [f"run.dir={run}", "run.steps=10", *overrides])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was killed after its seventh step; its checkpoints are of the third and the sixth."""
    path = tmp_path / "some" / "run"
    with closing(RunDirectory(debug(path))) as directory:
        assert (directory.latest, directory.finished) == (None, False)
        for step in range(8):
            report(directory, step)
            if step in (3, 6):
                save(directory, step)
        directory.checkpoints.stage(9)  # close removes it
    (path / "checkpoints" / ".step-8.staged").mkdir()
    return path


def report(directory: RunDirectory, step: int) -> None:
    """Two lines of each step; evaluations begin before the first."""
    for path in (directory.metrics, directory.updates, directory.evaluations, directory.samples):
        with path.open("a") as lines:
            if step > 0 or path == directory.evaluations:
                lines.write(json.dumps({"step": step, "x": "ä"}) + "\n" + json.dumps({"step": step, "x": 2}) + "\n")


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def problems(config: RunConfig) -> list[str]:
    """The fields that prevent a resume; the directory is unchanged."""
    path = Path(config.run.dir)
    before = content(path)
    with pytest.raises(ConfigError) as refusal:
        RunDirectory(config)
    assert {name: data for name, data in content(path).items() if "checkpoints/." not in name} == before
    return [problem.field for problem in refusal.value.problems]


def test_a_run_resumes_at_its_latest_checkpoint(run: Path) -> None:
    with closing(RunDirectory(debug(run))) as directory:
        assert directory.latest is not None
        assert (directory.latest.step, directory.latest.state, directory.finished) == (6, {"version": 6}, False)
        assert steps(directory.evaluations) == [step for step in range(7) for _ in range(2)]
        for path in (directory.metrics, directory.updates, directory.samples):
            assert steps(path) == [step for step in range(1, 7) for _ in range(2)]
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-3", "step-6"]
        assert not list(run.glob("config.until-*"))


@pytest.mark.parametrize("rest", ['{"step": 4', '{"step": 4}', "\0\0\0\n", '{"st\n{"step": 4}\n'])
def test_a_line_truncated_by_a_kill_is_removed(run: Path, rest: str) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + rest)
    with closing(RunDirectory(debug(run))) as directory:
        assert steps(directory.metrics) == [1, 2]


def test_a_run_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    config = debug(tmp_path)
    with closing(RunDirectory(config)) as directory:
        report(directory, 0)
        report(directory, 1)
    with closing(RunDirectory(config)) as directory:
        assert directory.latest is None
        for path in (directory.metrics, directory.updates, directory.evaluations, directory.samples):
            assert path.read_text() == ""


MAY_CHANGE = [
    "run.steps=11",
    "checkpoint.keep=1",
    "checkpoint.every=2",
    "tracking.samples=0",
    "groups.train.roles.actor.tp=1",
    "groups.train.roles.critic.tokens_per_micro_batch=100",
    "cluster.time_limits.sync=17",
    "actor.optimizer.lr=1e-7",
    "algo.policy_loss.clip=0.3",
    "rollout.temperature=0.5",
]


def test_settings_that_do_not_affect_the_checkpoint_may_change(run: Path) -> None:
    old = (run / "config.yaml").read_text()
    config = debug(run, *MAY_CHANGE)
    with closing(RunDirectory(config)) as directory:
        assert directory.latest is not None
    assert load(run / "config.yaml") == config
    assert (run / "config.until-step-6.yaml").read_text() == old


def test_a_run_from_before_a_mapping_existed_resumes(run: Path) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["reference"].pop("teachers") == {}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    with closing(RunDirectory(debug(run))) as directory:
        assert directory.latest is not None


REFUSED = {
    "model.random.config.num_hidden_layers": "8",
    "model.random.seed": "5",
    "run.seed": "5",
    "data.random.count": "99",
    "critic.head_std": "0.1",
    "critic.value_norm": "{}",
    "reward.head_seed": "5",
    "actor.ema": "{}",
    "algo.kl.coef": "0.5",
    "run.steps": "5",
}


def test_settings_that_affect_the_checkpoint_may_not_change(run: Path) -> None:
    config = debug(run, *(f"{field}={value}" for field, value in REFUSED.items()))
    assert problems(config) == [*REFUSED]
    with pytest.raises(ConfigError) as refusal:
        RunDirectory(config)
    found = {problem.field: (problem.value, problem.rule.split(":")[0]) for problem in refusal.value.problems}
    assert found["run.seed"] == ("5", "stays 1 when a run resumes")
    assert found["critic.value_norm"] == ("{beta: 0.99995, eps: 1.0e-05}", "stays null when a run resumes")
    assert all("another run.dir" in problem.fix for problem in refusal.value.problems if problem.field != "run.steps")


def test_another_stage_or_source_of_data_is_refused(run: Path, tmp_path: Path) -> None:
    assert problems(load(DEBUG.with_stem("sft"), [f"run.dir={run}"])) == ["stage"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"token_ids": [1]}\n')
    found = problems(debug(run, "data.random=null", f"data.prompts={prompts}"))
    assert {field.split(".")[1] for field in found} == {"prompts", "random"}


def test_roles_that_the_checkpoint_lacks_are_refused(run: Path) -> None:
    with closing(RunDirectory(debug(run))) as directory:
        directory.checkpoints.commit(8, write_roles(directory.checkpoints.stage(8), ["actor"]), {})
    assert problems(debug(run)) == ["groups"]


def test_a_finished_run_is_left_unchanged(run: Path) -> None:
    finish(run)
    before = content(run)
    with closing(RunDirectory(debug(run, "algo.policy_loss.clip=0.3"))) as directory:
        assert directory.finished
    assert content(run) == before


@pytest.mark.parametrize(("steps", "killed"), [(12, False), (10, True)])
def test_a_finished_run_continues_with_more_steps_and_one_killed_at_its_end_ends_again(
    run: Path, steps: int, *, killed: bool
) -> None:
    finish(run)
    if killed:
        (run / "summary.json").unlink()
    with closing(RunDirectory(debug(run, f"run.steps={steps}"))) as directory:
        assert directory.latest is not None
        assert (directory.latest.step, directory.finished) == (10, False)
    assert not (run / "export").exists()
    assert not (run / "summary.json").exists()


@pytest.mark.parametrize("steps", [10, 12])
def test_a_finished_run_without_checkpoints_is_not_restarted(run: Path, steps: int) -> None:
    finish(run)
    shutil.rmtree(run / "checkpoints")
    assert problems(debug(run, f"run.steps={steps}")) == ["run.dir"]
    assert (run / "export" / "config.json").exists()


def finish(run: Path) -> None:
    with closing(RunDirectory(debug(run))) as directory:
        for step in (7, 8, 9, 10):
            report(directory, step)
        save(directory, 10)
        directory.export.mkdir()
        (directory.export / "config.json").write_text("{}")
        directory.summary.write_text("{}")


def test_a_broken_checkpoint_is_reported_with_a_fix(run: Path) -> None:
    (run / "checkpoints/step-6/actor/0-0.bin").write_bytes(b"")
    with pytest.raises(ConfigError) as refusal:
        RunDirectory(debug(run))
    (problem,) = refusal.value.problems
    assert problem.field == "run.dir"
    assert "actor/0-0.bin of actor rank 0 has 0 bytes, not 1000" in problem.rule
    assert f"remove {run}/checkpoints/step-6" in problem.fix


def _hold(path: Path, pipe: Any) -> None:
    directory = RunDirectory(debug(path))
    pipe.send("held")
    pipe.recv()
    del directory


@pytest.mark.process
def test_one_process_at_a_time(run: Path) -> None:
    """The second one does not touch the first one's files; when the first is killed, the lock is released."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(run, theirs))
    process.start()
    assert ours.recv() == "held"
    staged = run / "checkpoints" / ".step-7.staged"
    staged.mkdir()
    with pytest.raises(ConfigError, match="is run by one process at a time"):
        RunDirectory(debug(run))
    assert staged.exists()
    process.kill()
    process.join()
    with closing(RunDirectory(debug(run))) as directory:
        assert directory.latest is not None
    assert not staged.exists()
