"""The GPU benchmark: its configurations, its parts, and that a failed part does not stop it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import trl_grpo
from benchmarks.gpu.__main__ import Part, longest_kernels, parts, work_off
from benchmarks.gpu.work import SIZES, figures
from megarl.config import load
from megarl.models import model_spec
from megarl.preflight.memory_plan import plan_memory
from megarl.rewards.functions import Completion, soft_overlong
from tests.leftovers import Trace, comes_true

_FAILS = "import sys; print('why'); sys.exit(3)"
_HANGS = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
_COUNTS = "import sys; open(sys.argv[1], 'a').write('x')"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_configuration_is_valid(device: str, tmp_path: Path) -> None:
    found = parts(tmp_path, device)
    tests = Path(__file__).parent.glob("gpu/test_*.py")
    assert {name for name in found if name.startswith("tests-")} == {f"tests-{file.stem[5:]}" for file in tests}
    files = {file.stem: load(file) for file in tmp_path.glob("*.yaml")}
    assert len(files) >= 3
    assert files.keys() <= found.keys()
    assert {config.cluster.device for config in files.values()} == {device}


def test_every_run_is_planned_to_fit_into_80_gb(tmp_path: Path) -> None:
    parts(tmp_path, "cuda")
    for file in tmp_path.glob("*.yaml"):
        peaks = {phase.phase: phase.peak / 2**30 for plan in plan_memory(load(file)) for phase in plan.phases()}
        assert {"generate", "inference", "update", "sync", "checkpoint"} == peaks.keys()
        assert max(peaks.values()) < 79, (file.stem, peaks)


@pytest.mark.parametrize(("name", "published"), [("0.5b", 0.494e9), ("1.5b", 1.544e9), ("3b", 3.086e9)])
def test_the_sizes_equal_qwens(name: str, published: float) -> None:
    tensors = model_spec(SIZES[name].hf_config).canonical().values()
    assert sum(math.prod(info.shape) for info in tensors) == pytest.approx(published, rel=1e-3)


def test_figures_by_hand(tmp_path: Path) -> None:
    """The first step does not count, nor the profiled last one; 1000 tokens in a step of 4 s."""
    step = {"time/step": 4.0, "time/rollout": 2.0, "time/written": 1.0, "policy/loss": 1.0}
    later = {**step, "perf/tokens_per_second": 250.0, "perf/mfu/actor_update": 0.5, "sync/seconds": 0.1}
    others = dict.fromkeys(later, 99.0)
    lines = [others, later, {**later, "sync/seconds": 0.3}, others]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert figures(tmp_path) == {
        "time/step": 4.0,
        "time/rollout": 2.0,
        "perf/tokens_per_second": 250.0,
        "perf/mfu/actor_update": 0.5,
        "sync/seconds": pytest.approx(0.2),
    }


def test_trl_gets_the_same_work_as_the_runs(tmp_path: Path) -> None:
    assert {name: trl_grpo.micro_batch(size) for name, size in SIZES.items()} == {
        "0.5b": 8,
        "1.5b": 4,
        "3b": 2,
        "tiny": 4,
    }
    size = SIZES["tiny"]
    texts = trl_grpo.prompts(size, 50)
    ids = trl_grpo.write_model(tmp_path, size)(text=texts)["input_ids"]
    assert ids == [[int(word) for word in text.split()] for text in texts]
    assert {len(prompt) for prompt in ids} == set(range(8, 17))
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, *size.stop_token_ids]
    completions = [completion(length) for length in (1, 8, 12, 16)]
    expected = [soft_overlong(one, max_tokens=16, buffer_tokens=8) for one in completions]
    assert trl_grpo.overlong(size, [one.response_ids for one in completions]) == expected == [0, 0, -0.5, -1]


def completion(length: int) -> Completion:
    return Completion(
        prompt_id="0", prompt="", response="", prompt_ids=(), response_ids=(1,) * length, finished=True, fields={}
    )


def test_trls_figures_by_hand() -> None:
    """The first step does not count; 300 tokens in the 3 s of two others."""
    totals, lengths = (50.0, 150.0, 350.0), (9.0, 4.0, 6.0)
    log = [{"num_tokens": total, "completions/mean_length": n} for total, n in zip(totals, lengths, strict=True)]
    assert trl_grpo.figures([10.0, 15.0, 16.0, 18.0], [4.0, 0.5, 0.7], log) == {
        "time/step": 1.5,
        "time/rollout": pytest.approx(0.6),
        "perf/tokens_per_second": 100.0,
        "response_length/mean": 5.0,
    }


def test_calls_of_the_same_name_are_told_apart_by_their_process(tmp_path: Path) -> None:
    def profile(seconds: float) -> list[dict[str, Any]]:
        return [
            {"name": "update.update", "seconds": 3 * seconds, "kernels": [{"name": "aten::mm", "seconds": seconds}]}
        ]

    (tmp_path / "profile").mkdir()
    found = {"train rank 0": profile(1.0), "critic rank 0": profile(2.0)}
    (tmp_path / "profile" / "step-5.json").write_text(json.dumps(found))
    assert longest_kernels(tmp_path) == {
        "profile/train rank 0/update.update": {"seconds": 3.0, "aten::mm": 1.0},
        "profile/critic rank 0/update.update": {"seconds": 6.0, "aten::mm": 2.0},
    }


@pytest.mark.process
def test_a_failed_part_does_not_stop_the_others_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a second call, parts that were not tried come first."""
    trace = Trace()
    for name, value in trace.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "_GRACE_S", 1.0)
    counter = tmp_path / "count"
    found = {
        "fails": Part(command=[sys.executable, "-c", _FAILS], limit_s=60),
        "hangs": Part(command=[sys.executable, "-c", _HANGS], limit_s=3),
        "unreadable": Part(command=["true"], limit_s=60, figures=lambda: {"a": 1 // 0}),
        "works": Part(
            command=[sys.executable, "-c", _COUNTS, str(counter)],
            limit_s=60,
            figures=lambda: {"times": len(counter.read_text())},
        ),
    }
    for tried_first in ("fails", "new"):
        results = work_off(tmp_path, found, {"name": "CPU"}, minutes=2)
        assert capsys.readouterr().out.split()[0] == tried_first
        assert json.loads((tmp_path / "results.json").read_text()) == {"machine": {"name": "CPU"}, "parts": results}
        assert (results["fails"]["status"], results["fails"]["log"]) == (3, ["why"])
        assert results["hangs"]["status"] == "ended after 3 s"
        assert results["unreadable"]["figures_error"].startswith("ZeroDivisionError")
        assert results["works"]["figures"] == {"times": 1}
        found["new"] = Part(command=["true"], limit_s=60)
    assert comes_true(lambda: not trace.processes())
    assert work_off(tmp_path / "late", found, {}, minutes=0) == {}


@pytest.mark.e2e
def test_runs_and_raw_vllm_are_measured(tmp_path: Path) -> None:
    found = parts(tmp_path, "cpu")
    results = work_off(tmp_path, {name: found[name] for name in ("grpo-tiny", "vllm-tiny")}, {}, minutes=10)
    assert [result["status"] for result in results.values()] == [0, 0], results
    run = results["grpo-tiny"]["figures"]
    assert {"time/step", "sync/gb_per_second", "rollout/logprob_gap", "planned/update"} <= run.keys()
    assert run["profile/train rank 0/update.update"]["aten::mm"] > 0
    assert all(result["figures"]["perf/rollout_tokens_per_second"] > 0 for result in results.values())
    assert not list(tmp_path.rglob("*.safetensors"))
