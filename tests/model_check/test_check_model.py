"""``megarl check-model``: small models of all families, what it says of seeded faults, and a whole check."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.certificates import default_config
from megarl.cli import app
from megarl.errors import RunError
from megarl.model_check import checks, runs
from megarl.model_check.checks import TOLERANCES, CheckResult, check_model
from megarl.model_check.runs import RolloutGaps
from megarl.model_check.small_models import small_config, write_small_model
from megarl.model_check.training_oracle import Step, differences, transformers_step
from megarl.models import model_spec
from megarl.models.families import FAMILIES
from megarl.types import Layout
from megarl.weights.hf_files import HFDirectory
from tests.megatron.tiny import save_model


@pytest.mark.parametrize("family", FAMILIES)
def test_small_models_have_all_kinds_of_layers(family: str, tmp_path: Path) -> None:
    config = default_config(family)
    small = small_config(config)
    kinds = [len(model_spec(each).table.kinds) for each in (config, small)]
    assert kinds[0] == kinds[1]
    write_small_model(small, tmp_path / "model")
    files = HFDirectory(tmp_path / "model")
    files.check(model_spec(small).manifest())
    assert sum(file.stat().st_size for file in set(files.file_of.values())) < 60 << 20


@pytest.mark.parametrize(
    ("family", "changes", "dropped"),
    [
        ("qwen2", {"head_dim": 128}, ()),
        ("qwen3", {}, ("num_key_value_heads",)),
        ("mistral", {}, ("sliding_window", "num_key_value_heads")),
        ("deepseek_v3", {}, ("n_group", "topk_group")),
        ("qwen3_next", {}, ("linear_num_key_heads", "num_experts", "moe_intermediate_size")),
        ("qwen3_5", {"vision_config": {}, "dtype": "bfloat16"}, ()),
        ("deepseek_v3", {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 4, "n_routed_experts": 96}, ()),
        ("glm4_moe", {"num_local_experts": 128}, ()),
    ],
)
def test_fields_that_a_config_lacks_are_made_small_too(
    family: str, changes: dict[str, Any], dropped: tuple[str, ...]
) -> None:
    config = {name: value for name, value in default_config(family).items() if name not in dropped} | changes
    spec = model_spec(small_config(config))
    assert sum(math.prod(info.shape) for info in spec.canonical().values()) < 15_000_000
    assert spec.table.layers[0].window in (None, 16)
    assert spec.dtype == "float32"


def test_a_config_that_is_not_supported_ends_the_check(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    done = CliRunner().invoke(app, ["check-model", str(model), "--json"])
    (finding,) = map(json.loads, done.stdout.splitlines())
    assert (done.exit_code, finding["check"], finding["status"]) == (1, "config", "failed")
    assert "hidden_act" in finding["detail"]


@pytest.mark.parametrize("case", ["no directory", "kept"])
def test_wrong_arguments_have_exit_code_2(tmp_path: Path, case: str) -> None:
    model = save_model(tmp_path / "model")
    arguments = [str(tmp_path / "nowhere")] if case == "no directory" else [str(model), "--keep", str(model)]
    done = CliRunner().invoke(app, ["check-model", *arguments])
    assert done.exit_code == 2
    assert arguments[-1] in done.stderr


def test_tensors_that_files_lack_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = save_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    _, files = islice(check_model(model, tmp_path), 2)
    assert (files.check, files.status) == ("files", "failed")
    assert "model.norm.weight" in files.detail


STEP = Step(before=2.0, after=1.5, grad_norm=3.0, weights={"a": torch.ones(3), "b": torch.zeros(2, 2)})


def test_a_step_differs_in_what_is_changed() -> None:
    assert set(differences(STEP, STEP).values()) == {0.0}
    wrong = {
        "loss": replace(STEP, before=2.001),
        "gradient": replace(STEP, grad_norm=3.01),
        "weights": replace(STEP, weights={**STEP.weights, "b": torch.tensor([[0.0, 1e-4], [0.0, 0.0]])}),
        "next loss": replace(STEP, after=1.501),
    }
    assert wrong.keys() == TOLERANCES.keys()
    for name, step in wrong.items():
        found = differences(step, STEP)
        assert [each for each, value in found.items() if not value <= TOLERANCES[each]] == [name]
    broken = differences(replace(STEP, weights={**STEP.weights, "a": torch.full((3,), torch.nan)}), STEP)
    assert not broken["weights"] <= TOLERANCES["weights"]
    with pytest.raises(ValueError, match="other tensors than transformers: b"):
        differences(replace(STEP, weights={"a": torch.ones(3)}), STEP)


SAME = RolloutGaps(loaded=1e-6, sampled=[1e-6] * 3, grad_norms=[1.0] * 3)
WRONG_ROLLOUTS = {
    "before training is above 1e-04": replace(SAME, loaded=1e-3),
    "step 2 is above 1e-04": replace(SAME, sampled=[1e-6, float("nan"), 1e-6]),
    "no gradient": replace(SAME, grad_norms=[1.0, 0.0, 1.0]),
}


@pytest.fixture
def without_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The config of a model whose checks start nothing; each of these passes."""
    passed = partial(CheckResult, status="passed", detail="")
    monkeypatch.setattr(checks, "_engine_loader", lambda model, check: passed(check=check))
    monkeypatch.setattr(checks, "fine_tune", lambda *arguments: STEP)
    monkeypatch.setattr(checks, "transformers_step", lambda *arguments: STEP)
    monkeypatch.setattr(checks, "import_checkpoint", lambda *arguments: None)
    monkeypatch.setattr(checks, "compare", lambda *arguments: (3, []))
    monkeypatch.setattr(checks, "roll_out", lambda *arguments: SAME)
    (tmp_path / "config.json").write_text(json.dumps(default_config("qwen3_moe")))
    (tmp_path / "workspace").mkdir()
    return tmp_path


def failed(directory: Path) -> list[CheckResult]:
    found = list(check_model(directory, directory / "workspace"))
    assert len(found) == 10
    return [finding for finding in found if finding.status == "failed"]


def test_without_a_fault_nothing_fails(without_runs: Path) -> None:
    assert failed(without_runs) == []


@pytest.mark.parametrize("text", WRONG_ROLLOUTS)
def test_engines_that_differ_fail(without_runs: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(checks, "roll_out", lambda *arguments: WRONG_ROLLOUTS[text])
    (finding,) = failed(without_runs)
    assert finding.check == "rollouts"
    assert text in finding.detail


def test_a_layout_that_differs_or_whose_run_fails_is_named(without_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fine_tune(model: Path, directory: Path, texts: Any, layout: Layout) -> Step:
        if layout.ep == 2:
            raise KeyError("eval/loss")
        return replace(STEP, grad_norm=3.0 + 0.01 * (layout.pp == 2))

    monkeypatch.setattr(checks, "fine_tune", fine_tune)
    split, experts = failed(without_runs)
    assert (split.check, experts.check) == ("training, TP 2 x PP 2", "training, EP 2")
    assert "gradient is above 1e-04" in split.detail
    assert experts.detail.startswith("KeyError: 'eval/loss'")
    assert "in fine_tune" in (without_runs / "workspace" / "training,_EP_2.txt").read_text()


def test_tensors_that_a_conversion_changes_are_named(without_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "compare", lambda *arguments: (3, ["model.norm.weight"]))
    (finding,) = failed(without_runs)
    assert (finding.check, finding.detail.splitlines()[-1]) == ("conversion", "model.norm.weight")


@pytest.mark.process
def test_a_run_that_fails_or_hangs_shows_the_end_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"(?s)exit code 2.*model\.path"):
        runs.roll_out(tmp_path / "nowhere", tmp_path / "refused")
    monkeypatch.setattr(runs, "LIMIT_S", 0)
    with pytest.raises(RunError, match="took more than 0 s"):
        runs.roll_out(tmp_path / "nowhere", tmp_path / "hung")


@pytest.mark.e2e
def test_a_step_of_a_run_is_that_of_transformers(tmp_path: Path) -> None:
    config = {**small_config(default_config("qwen3")), "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    write_small_model(config, tmp_path / "model")
    expected = transformers_step(tmp_path / "model", tmp_path / "after", model_spec(config), checks._texts())
    finding = checks._step(tmp_path / "model", tmp_path / "run", checks._texts(), Layout(), expected, "training")
    assert finding.status == "passed", finding.detail
    assert expected.after < expected.before - 0.1


@pytest.mark.e2e
@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5", "deepseek_v3"])
def test_a_model_passes_all_checks(family: str, tmp_path: Path) -> None:
    """Experts; gated delta nets in files with a vision tower; latent attention."""
    (tmp_path / "config.json").write_text(json.dumps(default_config(family)))
    done = CliRunner().invoke(app, ["check-model", str(tmp_path), "--json"])
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 0, findings
    assert [finding["check"] for finding in findings if finding["status"] == "skipped"] == ["files"]
