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
from benchmarks.gpu.__main__ import Part, longest_kernels, parts, summary, work_off
from benchmarks.gpu.roofline import Speeds, compare, layer_values, least_seconds
from benchmarks.gpu.work import SIZES, figures
from megarl.config import load
from megarl.models import model_spec
from megarl.models.flops import TokenCounts, forward_flops
from megarl.preflight.memory_plan import plan_memory
from megarl.rewards.functions import Completion, soft_overlong
from megarl.types import PackRow
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


@pytest.mark.parametrize(
    ("name", "published"),
    [("0.5b", 0.494e9), ("1.5b", 1.544e9), ("3b", 3.086e9), ("4b", 4.022e9), ("8b-8gpu", 8.191e9)],
)
def test_the_sizes_equal_qwens(name: str, published: float) -> None:
    tensors = model_spec(SIZES[name].hf_config).canonical().values()
    assert sum(math.prod(info.shape) for info in tensors) == pytest.approx(published, rel=1e-3)


def test_a_run_of_eight_gpus_is_left_out_where_there_are_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "machine", lambda: {"device": "cuda", "name": "GPU", "gpus": 4, "versions": {}})
    assert command.main([str(tmp_path), "--parts", "grpo-8b-8gpu"]) == 0
    assert "grpo-8b-8gpu is left out: it needs 8 GPUs, and torch sees 4\n" in capsys.readouterr().out
    config = load(tmp_path / "grpo-8b-8gpu.yaml")
    assert (config.layout("actor").tp, config.layout("actor").dp) == (4, 2)
    assert config.model_dump()["rollout"]["tp"] == 1
    assert len(plan_memory(config)) == 8


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


def test_the_kernels_are_measured_before_the_runs_that_are_compared_with_them(tmp_path: Path) -> None:
    first, second, *others = parts(tmp_path, "cuda")
    assert (first, second) == ("doctor", "kernels")
    kinds = [name.partition("-")[0] for name in others]
    assert kinds[:8] == [*["tests"] * 6, "grpo", "vllm"]


def test_the_least_time_of_an_update_by_hand() -> None:
    """Every product and every kernel of a layer once: forward, backward, and what attention computes again."""
    size = SIZES["1.5b"]
    hidden, ffn, vocab, layers = 1536, 8960, 151936, 28
    lengths, responses = [700, 300], [500, 280]
    rows: list[TokenCounts] = []
    for length, response in zip(lengths, responses, strict=True):
        rows.append(PackRow(chunk=0, row=0, prompt_tokens=length - response, response_tokens=response))
    flops = 3 * forward_flops(model_spec(size.hf_config), "lm", rows)
    speeds = Speeds(tflops=1e-12, gb_per_second=1e-9)  # seconds are operations and bytes
    least = least_seconds(size, speeds, tokens=1000, read=780, flops=flops)
    weights = hidden * (1536 + 2 * 256) + hidden * hidden + 3 * hidden * ffn
    products = 3 * 2 * (layers * weights * 1000 + hidden * vocab * 780)
    pairs = sum(i + 1 for n in lengths for i in range(n))
    logits = vocab * 780 * 3
    parameters = layers * weights + vocab * hidden
    assert least == {
        "products": products,
        "attention": pytest.approx((2 + 5) * 2 * layers * hidden * pairs),
        "element by element": pytest.approx(2 * (layers * 1000 * layer_values(size) + logits) + 10 * parameters),
        "optimizer": pytest.approx(50 * parameters),
    }


def test_what_an_update_loses_is_said_beside_its_mfu() -> None:
    names = {"nvjet_hsh_64x8": 0.5, "flash_fwd_kernel": 0.25, "triton_poi_fused_add": 1.0, "FusedAdam_kernel": 0.125}
    kernels = [{"name": name, "seconds": seconds} for name, seconds in names.items()]
    run = {
        "perf/tflop/actor_update": 400.0,
        "perf/tokens/actor_update": 140e3,
        "perf/tflops_per_device/actor_update": 200.0,
        "perf/mfu/actor_update": 0.2,
        "response_length/mean": 400.0,
    }
    speeds = Speeds.read("0.5b", {"products/0.5b/tflops": 600.0, "copy/gb_per_second": 2000.0})
    assert speeds.gb_per_second == 4000.0
    call = {"name": "update.update", "seconds": 2.0, "kernels": kernels}
    found = compare(SIZES["0.5b"], speeds, run, [{"name": "sync.send", "seconds": 1.0, "kernels": []}, call])
    taken = {key: value for key, value in found.items() if key.startswith("taken/")}
    assert [*taken.values()] == [0.5, 0.25, 1.0, 0.125, 0.125]
    least = sum(value for key, value in found.items() if key.startswith("least/") and key != "least/mfu")
    assert found["least/mfu"] == pytest.approx(400.0 / 1000.0 / least)
    rollouts = {"perf/rollout_tokens_per_second": 900.0}
    alone = {"vllm-0.5b": 1000.0, "vllm-ours-0.5b": 900.0}
    results = {name: {"figures": {"perf/rollout_tokens_per_second": speed}} for name, speed in alone.items()}
    lines = summary({"grpo-0.5b": {"figures": {**run, **found, **rollouts}}, "doctor": {}, **results})
    assert lines[1].split()[:1] + lines[1].split()[-1:] == ["products", "0.500"]
    assert lines[-3:] == [
        f"  MFU 0.200; {found['least/mfu']:.3f} if nothing were lost",
        "grpo-0.5b: rollouts at 90 % of vllm-0.5b",
        "grpo-0.5b: rollouts at 100 % of vllm-ours-0.5b",
    ]


def test_trl_gets_the_same_work_as_the_runs(tmp_path: Path) -> None:
    assert {name: trl_grpo.micro_batch(size) for name, size in SIZES.items()} == {
        "0.5b": 8,
        "1.5b": 4,
        "3b": 2,
        "4b": 4,
        "8b-8gpu": 8,
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
@pytest.mark.matrix
def test_runs_and_raw_vllm_are_measured(tmp_path: Path) -> None:
    found = parts(tmp_path, "cpu")
    chosen = {name: found[name] for name in ("kernels", "grpo-tiny", "vllm-ours-tiny")}
    results = work_off(tmp_path, chosen, {}, minutes=10)
    assert [result["status"] for result in results.values()] == [0, 0, 0], results
    run = results["grpo-tiny"]["figures"]
    assert {"time/step", "sync/gb_per_second", "rollout/logprob_gap", "planned/update"} <= run.keys()
    assert run["profile/train rank 0/update.update"]["aten::mm"] > 0
    assert run["taken/products"] > 0 < run["least/products"]
    assert len(summary(results)) == 7
    assert results["vllm-ours-tiny"]["figures"]["perf/rollout_tokens_per_second"] > 0
    assert not list(tmp_path.rglob("*.safetensors"))
