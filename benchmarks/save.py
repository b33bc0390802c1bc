"""What a checkpoint costs the training: seconds that the steps wait for it, written at once and in the background.

    python -m benchmarks.save [key.path=value ...]

Each of two runs fine-tunes a random model of 100 million parameters on one virtual device. The save after the last step
is left out: it is always written at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

CONFIG = Path(__file__).parents[1] / "configs/debug/sft.yaml"
EVERY, STEPS = 4, 13
MODEL = (
    "{vocab_size: 32000, hidden_size: 768, intermediate_size: 2048, num_hidden_layers: 12, num_attention_heads: 12, "
    "num_key_value_heads: 4}"
)
RUN = [
    f"model.random.config={MODEL}",
    "groups.train={devices: 0, roles: {actor: {tp: 1, pp: 1, tokens_per_micro_batch: 512}}}",
    "data.evaluation=null",
    f"run.steps={STEPS}",
    f"checkpoint={{every: {EVERY}, keep: 1}}",
]


def main(overrides: list[str]) -> None:
    stalls = {kind: measure(kind, overrides) for kind in ("at once", "background")}
    print(f"the background's part {stalls['background'] / stalls['at once']:.1%}")


def measure(kind: str, overrides: list[str]) -> float:
    """Prints what the saves of a run cost; returns the mean seconds that the steps waited for one."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        saved = f"checkpoint.async_save={'true' if kind == 'background' else 'false'}"
        command = [sys.executable, "-m", "megarl", "train", str(CONFIG), f"run.dir={run}", *RUN, saved, *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        events = json.loads((run / "trace.json").read_text())
        steps = [json.loads(line)["time/step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        size = sum(file.stat().st_size for file in (run / f"checkpoints/step-{STEPS}").rglob("*") if file.is_file())
    waits = [event["dur"] / 1e6 for event in events if event["name"] == "checkpoint" and event["ph"] == "X"][:-1]
    after = [seconds for step, seconds in enumerate(steps, start=1) if step % EVERY == 1 and step > 1]
    others = [seconds for step, seconds in enumerate(steps, start=1) if step % EVERY != 1]
    print(f"{kind:10}  {size / 2**20:.0f} MiB; waits {', '.join(f'{wait:.2f}' for wait in waits)} s")
    print(f"{'':10}  steps after a save {mean(after):.2f} s, others {mean(others):.2f} s")
    return mean(waits)


if __name__ == "__main__":
    main(sys.argv[1:])
