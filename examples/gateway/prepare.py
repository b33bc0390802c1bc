"""Writes a small random model, tasks and run.yaml: `python -m examples.gateway.prepare DIRECTORY`.

`megarl train DIRECTORY/run.yaml` then trains with a harness.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from examples.sort_letters.checkpoint import write_checkpoint

TEMPLATE = (
    "{% for m in messages %}{{ '<bos>' + m['role'] + ': ' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant: ' }}{% endif %}"
)
CONFIG = """\
stage: grpo
run: {{dir: {directory}/run, steps: {steps}}}
model: {{path: {directory}/model}}
data: {{prompts: {directory}/tasks.jsonl, prompts_per_step: 2, samples_per_prompt: 2}}
environment:
  name: gateway
  args: {{command: [{python}, -m, examples.gateway.harness]}}
  concurrency: 2  # harnesses at once
rollout: {{max_new_tokens: 4, max_model_len: 64}}
actor: {{optimizer: {{lr: 1.0e-3}}}}
"""


def prepare(directory: Path, steps: int = 4) -> None:
    write_checkpoint(directory / "model", seed=0)
    file = directory / "model" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}), encoding="utf-8")
    tasks = "".join(json.dumps({"number": number}) + "\n" for number in range(8))
    (directory / "tasks.jsonl").write_text(tasks, encoding="utf-8")
    config = CONFIG.format(directory=directory, steps=steps, python=sys.executable)
    (directory / "run.yaml").write_text(config, encoding="utf-8")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
