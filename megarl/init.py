"""`megarl init`: the files of a new run, a configuration with comments and a reward function with a test."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megarl.config import ConfigError, Problem
from megarl.config.inheritance import recipe_fix, recipes
from megarl.config.problems import correct_model_path, correct_path
from megarl.config.schema import read_hf_config
from megarl.decoder_fields import decoder_fields
from megarl.files import read_json

PROMPT_COLUMNS: Final = ("prompt", "messages", "prompt_ids", "token_ids")
_OTHER_PROMPT_COLUMNS = ("question", "problem", "instruction", "query", "input", "text")
ANSWER_COLUMNS: Final = ("answer", "solution", "ground_truth", "target", "label", "output")
"""Names of the column with the right answer, the most frequent first."""
_NEW_TOKENS = 256
_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """What a new run starts from: the options of `megarl init`."""

    name: str
    recipe: str
    model: str
    prompts: str
    steps: int

    @property
    def files(self) -> tuple[Path, ...]:
        """The configuration, the reward function and its test."""
        module = f"{self.name}_reward.py"
        return Path(f"{self.name}.yaml"), Path(module), Path(f"test_{module}")

    def write(self) -> None:
        """Writes the files; raises ConfigError if something that they name cannot be used, or one of them exists."""
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems, "megarl init")
        row = _first_row(self.prompts)
        answer = _answer(row)
        texts = (self._config(row), _reward(answer), self._test(row))
        for file, text in zip(self.files, texts, strict=True):
            file.write_text(text, encoding="utf-8")

    def _problems(self) -> Iterator[Problem]:
        if not self.name.isidentifier():
            rule = "a valid Python module name (letters, digits, _), because NAME_reward.py is imported"
            fix = f"write {re.sub(r'[^A-Za-z0-9_]', '_', Path(self.name).stem) or 'mine'}"
            yield Problem("name", self.name, rule, fix)
        for file in self.files:
            if file.exists():
                yield Problem("name", self.name, f"{file} exists, and is not overwritten", "choose another name")
        if self.recipe not in recipes():
            yield Problem("--from", self.recipe, "the name of a recipe", recipe_fix(self.recipe))
        try:
            read_hf_config(self.model)
            _has_chat_template(Path(self.model))
        except (OSError, ValueError) as error:
            rule = f"a directory with a readable config.json ({getattr(error, 'strerror', None) or error})"
            yield Problem("--model", self.model, rule, correct_model_path(self.model))
        try:
            _first_row(self.prompts)
        except (OSError, ValueError) as error:
            rule = f"a JSONL file of prompts ({getattr(error, 'strerror', None) or error})"
            yield Problem("--prompts", self.prompts, rule, correct_path(self.prompts))

    def _config(self, row: Mapping[str, Any]) -> str:
        positions = decoder_fields(read_hf_config(self.model)).get("max_position_embeddings")
        tokens = min(positions or _TOKENS, _TOKENS)
        source = json.dumps(self.prompts)
        column = _first_text(row, _OTHER_PROMPT_COLUMNS)
        if column is not None and not row.keys() & set(PROMPT_COLUMNS):
            source = f"{{path: {source}, columns: {{prompt: {column}}}}}"
        chat_template = str(_has_chat_template(Path(self.model))).lower()
        return f"""\
# megarl plan {self.name}.yaml     checks this file, and prints what would run
# megarl train {self.name}.yaml    trains; the same command resumes an interrupted run
# All fields: docs/configuration.md. A field on the command line: run.steps=5
defaults: [{self.recipe}]    # the algorithm and its settings; docs/recipes.md lists the others
run: {{dir: runs/{self.name}, steps: {self.steps}}}
model: {{path: {json.dumps(self.model)}}}
data:
  prompts: {source}
  chat_template: {chat_template}    # put a text into the model's chat template, as a user's message
  prompts_per_step: 8
  samples_per_prompt: 8
rollout:
  max_new_tokens: {min(_NEW_TOKENS, tokens // 2)}
  max_model_len: {tokens}    # of prompt and response together
  # devices: 6-7
reward:
  functions: [{{name: "{self.name}_reward:reward"}}]    # in {self.name}_reward.py
checkpoint: {{every: 20}}
cluster:
  threads_per_device: auto    # without a GPU: from the machine's cores
  # devices_per_node: 8
# Without devices_per_node, groups and rollout.devices, the run uses one device: a GPU or the CPU. Eight GPUs:
# groups: {{train: {{devices: 0-5, roles: {{actor: {{tp: 2}}}}}}}}    # and the other roles of the recipe
"""

    def _test(self, row: Mapping[str, Any]) -> str:
        names = (*PROMPT_COLUMNS, *_OTHER_PROMPT_COLUMNS)
        prompt = row.get(_first_text(row, names) or "", "")
        fields = {name: value for name, value in row.items() if name not in names}
        right = row.get(_answer(row) or "", "Some text.")
        return f"""\
from megarl.rewards.functions import Completion

from {self.name}_reward import reward


def answered(response: str) -> Completion:
    return Completion(
        prompt_id="0",
        prompt={prompt!r},
        response=response,
        prompt_ids=(),
        response_ids=(),
        finished=True,
        fields={fields!r},
    )


def test_a_right_answer_scores_above_an_empty_one() -> None:
    assert reward(answered({right!r})) > reward(answered(""))
"""


def _answer(row: Mapping[str, Any]) -> str | None:
    return _first_text(row, ANSWER_COLUMNS)


def _first_text(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Returns the first name of a column with text."""
    for name in names:
        if isinstance(row.get(name), str):
            return name
    return None


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").exists():
        return True
    settings = model / "tokenizer_config.json"
    return settings.exists() and "chat_template" in read_json(settings)


def _reward(answer: str | None) -> str:
    """Returns the module of the reward function; `answer` is the column with the right answer."""
    doc = "Returns 1 for a response that is not empty, else 0."
    value = "float(bool(completion.response.strip()))"
    if answer is not None:
        doc = f"Returns 1 if the response ends with the row's `{answer}`, else 0."
        value = f'float(completion.response.strip().endswith(completion.field("{answer}").strip()))'
    return f"""\
from megarl.rewards.functions import Completion


def reward(completion: Completion) -> float:
    \"\"\"{doc}\"\"\"
    return {value}
"""


def _first_row(path: str) -> Mapping[str, Any]:
    """Returns the first row; raises OSError or ValueError if there is none that can be read."""
    with open(path, encoding="utf-8") as lines:
        row: Any = json.loads(next(lines, "") or "null")
    if not isinstance(row, Mapping):
        raise ValueError("its first line is no JSON object")
    return row
