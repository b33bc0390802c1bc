"""Import and export of a random model with 1.1 billion bfloat16 parameters, against a plain copy of its files.

    python -m benchmarks.convert [--layers 22] [--vocab-size 32000]

Everything is written to one temporary directory, with an ``fsync`` of every file, and removed. A copy, a conversion and
transformers' load and save each run in a process of their own, whose peak of resident memory is reported; before each,
the system is asked to drop the input's pages (``posix_fadvise``), so that they read from the disk. The order is that of
the table; the copy is measured before and after, as disks vary. About 9 GB are in use at most.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from megarl.convert.resources import Resources
from megarl.models import model_spec
from megarl.weights.export import lay_out, write_index

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GB = 1e9


def write_random(directory: Path, config: Mapping[str, Any]) -> None:
    """The model's files, a tensor at a time."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    files = lay_out(model_spec(config).canonical(), max_file_bytes=10**9)
    for file in files:
        with open(directory / file.name, "wb") as stream:
            stream.write(file.header)
            for name in file.offsets:
                values = torch.randn(file.tensors[name].shape, generator=generator).to(torch.bfloat16)
                stream.write(values.view(torch.uint8).numpy().data)
            os.fsync(stream.fileno())
    write_index(directory, files)


def copy(source: Path, target: Path) -> None:
    """Copies a directory's files, durably, through memory as programs do."""
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb") as reading, (target / path.name).open("wb") as writing:
            shutil.copyfileobj(reading, writing, 16 << 20)
            os.fsync(writing.fileno())


def load_and_save(source: Path, target: Path) -> None:
    """Loads the model with transformers and saves it."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target, max_shard_size="1GB")
    for path in target.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def convert(kind: str, processes: int) -> Callable[[Path, Path], None]:
    """An import or an export."""

    def run(source: Path, target: Path) -> None:
        from megarl.convert.exporting import export_checkpoint
        from megarl.convert.importing import import_checkpoint

        resources = Resources(memory=16 << 30, processes=processes)
        work = import_checkpoint if kind == "import" else export_checkpoint
        work(source, target, resources=resources, max_file_bytes=10**9)

    return run


WORK: dict[str, Callable[[Path, Path], None]] = {
    "copy": copy,
    "import": convert("import", 1),
    "import, 2 processes": convert("import", 2),
    "export": convert("export", 1),
    "export, 2 processes": convert("export", 2),
    "transformers": load_and_save,
}


def _measured(name: str, source: Path, target: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds, and the peak of resident GB, of some work in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.convert", "--work", name, str(source), str(target)]
    *_, last = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    seconds, cpu, peak = json.loads(last)
    return seconds, cpu, peak / GB


def _work(name: str, source: Path, target: Path) -> None:
    """Does it, in this process, and prints what it took; of several processes, the sum of their peaks."""
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start, cpu = perf_counter(), process_time()
    WORK[name](source, target)
    seconds, cpu = perf_counter() - start, process_time() - cpu
    with open("/proc/self/status") as status:  # getrusage would count the peak of the process that started this one
        own = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    processes = 2 if "2 processes" in name else 0
    peak = (own + processes * others.ru_maxrss) << 10
    print(json.dumps([seconds, cpu + others.ru_utime + others.ru_stime, peak]))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--work", nargs=3, metavar=("WHAT", "SOURCE", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work is not None:
        name, source, target = options.work
        _work(name, Path(source), Path(target))
    else:
        measure_all({**CONFIG, "num_hidden_layers": options.layers, "vocab_size": options.vocab_size})


def measure_all(config: Mapping[str, Any]) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory(prefix="megarl-convert-") as name:
        root = Path(name)
        write_random(root / "hf", config)
        nbytes = sum(path.stat().st_size for path in (root / "hf").glob("*.safetensors"))
        rows: list[tuple[str, float, float, float]] = []

        def measure(work: str, source: str, target: str, *, keep: bool = False) -> None:
            rows.append((work, *_measured(work, root / source, root / target)))
            if not keep:
                shutil.rmtree(root / target)

        measure("copy", "hf", "copied")
        measure("import", "hf", "ckpt", keep=True)
        measure("import, 2 processes", "hf", "other")
        measure("export", "ckpt", "out")
        measure("export, 2 processes", "ckpt", "out")
        measure("transformers", "hf", "saved")
        measure("copy", "hf", "copied")
        copied = sum(seconds for work, seconds, *_ in rows if work == "copy") / 2
        print(f"{nbytes / GB:.2f} GB of bfloat16, cold reads, fsync of every file; files of 1 GB")
        print(f"{'':22}{'seconds':>9}{'MB/s':>8}{'of copy':>9}{'CPU s':>8}{'peak GB':>9}")
        for work, seconds, cpu, peak in rows:
            print(f"{work:22}{seconds:9.1f}{nbytes / 1e6 / seconds:8.0f}{seconds / copied:9.2f}{cpu:8.1f}{peak:9.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
