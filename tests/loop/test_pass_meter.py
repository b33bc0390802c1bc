"""The metrics of passes and of processes, by hand."""

from __future__ import annotations

import pytest

from megarl.cluster.process_usage import ProcessUsage
from megarl.loop.pass_meter import PassMeter
from megarl.models import model_spec
from megarl.models.flops import forward_flops
from megarl.types import PackRow, RankSchedule, Schedule
from tests.config.debug import debug

ROWS = [PackRow(chunk=0, row=row, prompt_tokens=4, response_tokens=6) for row in range(6)]


def schedule(*ranks: list[PackRow]) -> Schedule:
    """A pack per rank."""
    made = [
        RankSchedule(
            packs=(tuple(rows),),
            teachers=("",),
            pack_tokens=64,
            total_rows=6,
            total_sequences=6,
            total_response_tokens=36,
        )
        for rows in ranks
    ]
    return Schedule(ranks=tuple(made))


def usage(device_name: str, idle: float = 0.0, **peaks: int) -> ProcessUsage:
    return ProcessUsage(idle=idle, peak_bytes=peaks, device_name=device_name)  # pyright: ignore[reportArgumentType]


def test_passes_are_summed_until_they_are_read() -> None:
    config = debug()
    meter, once = PassMeter(config), forward_flops(model_spec(config.model.hf_config()), "lm", ROWS)
    meter.add("logprobs", "actor", ROWS, 0.5)
    for _ in range(2):
        meter.add_update("actor", [schedule(ROWS[:4], ROWS[4:]), schedule(ROWS)], 2.0)
    metrics = meter.take({"train": [usage("NVIDIA H100 80GB HBM3")] * 4})
    assert metrics["perf/tokens/logprobs"] == 60
    assert metrics["perf/tokens/actor_update"] == 240
    assert metrics["perf/tokens_per_second/actor_update"] == 60
    assert metrics["perf/tflop/actor_update"] == pytest.approx(4 * 3 * once / 1e12)
    assert metrics["perf/tflops_per_device/logprobs"] == pytest.approx(once / 1e12 / 0.5 / 4)
    assert metrics["perf/mfu/logprobs"] == pytest.approx(once / 1e12 / 0.5 / 4 / 989)
    assert not any("logprobs" in name for name in meter.take({}))


def test_heads_of_other_roles_cost_less() -> None:
    meter = PassMeter(debug())
    meter.add("values", "critic", ROWS, 1.0)
    meter.add("ref", "reference", ROWS, 1.0)
    metrics = meter.take({})
    hidden, vocab = 128, 100
    assert metrics["perf/tflop/ref"] - metrics["perf/tflop/values"] == pytest.approx(
        2 * hidden * (vocab - 1) * 36 / 1e12, rel=1e-6
    )


@pytest.mark.parametrize(
    ("names", "override", "peak"),
    [
        (["NVIDIA A100-SXM4-80GB"], [], 312),
        (["NVIDIA A100-SXM4-80GB"], ["cluster.peak_tflops=100"], 100),
        ([""], ["cluster.peak_tflops=0.1"], 0.1),
        ([""], [], None),
        (["NVIDIA A100-SXM4-80GB", "NVIDIA H200"], [], None),
    ],
)
def test_peak_flops_are_the_devices_or_the_configured(
    names: list[str], override: list[str], peak: float | None
) -> None:
    meter = PassMeter(debug(*override))
    meter.add("logprobs", "actor", ROWS, 1.0)
    metrics = meter.take({"train": [usage(name) for name in names]})
    achieved = metrics["perf/tflops_per_device/logprobs"]
    assert metrics.get("perf/mfu/logprobs") == (None if peak is None else pytest.approx(achieved / peak))


def test_group_memory_is_the_maximum_and_idle_time_the_mean_over_processes() -> None:
    processes = [usage("", 0.5, update=2**30), usage("", 0.25, update=2**31, sync=2**29)]
    assert PassMeter(debug()).take({"train": processes}) == {
        "perf/idle/train": 0.375,
        "memory/update/train": 2,
        "memory/sync/train": 0.5,
    }
