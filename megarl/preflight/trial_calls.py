"""Calls every reward function, and the environment, before a run starts, on rows of its data."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final

from megarl.config import ConfigError, Problem, RolloutTrainingConfig, RunConfig, SamplingConfig
from megarl.config.schema import EnvironmentSettings, Reward, RewardFunction
from megarl.conversations.chat import ChatRenderer
from megarl.conversations.environment_calls import EnvironmentChildren
from megarl.conversations.environment_process import task_of
from megarl.data.prompt_curriculum import curriculum_of
from megarl.data.tokenizer import Tokenizer
from megarl.environments.environment import FailedEnvironmentError
from megarl.environments.python_program import FIX, bubblewrap
from megarl.errors import RunError
from megarl.preflight.datasets import Sets, scored_prompts
from megarl.preflight.user_functions import adapter_fix
from megarl.rewards.completion import Completion
from megarl.rewards.functions import resolve
from megarl.rewards.scorer import RuleScorer, Unscored
from megarl.texts import short_reason
from megarl.types import Prompt

_LINES = 4
"""Number of a traceback's last lines that are shown."""
_LOAD_S = 300.0
"""Seconds in which the user's modules are loaded."""
_MEMORY: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
"""Bytes of a process that calls the user's code: half of the machine's."""
_CHARACTERS = 2000
"""Longest text of a row that stands for a response."""


def call_functions(config: RunConfig, sets: Sets) -> Sequence[int]:
    """Calls every function of the run on a prompt, and on two others if it fails; draws a first step's prompts.

    The response is the prompt itself, and for the second prompt a text of its row; a function of a
    batch or a group gets it twice. A call has `reward.time_limit`.
    An environment begins a conversation; returns the ids of its first prompt, none
    without an environment.

    Raises:
        ConfigError: a function failed on all of them, or the environment failed.
    """
    if not isinstance(config, SamplingConfig):
        return ()
    first: Sequence[int] = ()
    problems = list(_sandbox(config.environment))
    if problems:
        raise ConfigError(problems)
    if config.environment is not None and config.environment.name != "gateway":  # whose harnesses begin by themselves
        try:
            first = asyncio.run(_first_prompt(config, sets))
        except (FailedEnvironmentError, RunError, ValueError) as error:
            reason = "\n      ".join(short_reason(str(error)).splitlines()[-_LINES:])
            rule = f"must begin a conversation on a row of the data; it failed:\n      {reason}"
            fix = "correct it, its args or the row, or name another one; see docs/environments.md"
            raise ConfigError([Problem("environment.name", config.environment.name, rule, fix)]) from error
    if isinstance(config, RolloutTrainingConfig):
        problems += _curriculum(config, sets.rows["data.prompts"])
    for where, functions, prompts in scored_prompts(config, sets.rows):
        problems += _problems(where, functions, prompts, sets.tokenizer, config.reward)
    if problems:
        raise ConfigError(problems)
    return first


def _sandbox(environment: EnvironmentSettings | None) -> Iterator[Problem]:
    """Programs of the tool `python` can run, unless they may without a sandbox."""
    if environment is None or environment.name != "tools" or environment.args.get("sandbox") == "none":
        return
    if "python" in environment.args.get("functions", ()):
        try:
            bubblewrap()
        except ValueError as error:
            yield Problem("environment.args.functions", "python", f"must run programs in a sandbox: {error}", FIX)


def _curriculum(config: RolloutTrainingConfig, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Draws the prompts of the first step, without any scores."""
    curriculum = curriculum_of(config, prompts)
    if curriculum is not None:
        try:
            curriculum.next(1, config.data.prompts_per_step, [])
        except RunError as error:
            fix = "correct it; docs/algorithms.md describes what it gets and returns"
            rule = str(error).removeprefix("data.curriculum: ")
            yield Problem("data.curriculum", config.data.curriculum.name, rule, fix)


async def _first_prompt(config: SamplingConfig, sets: Sets) -> Sequence[int]:
    """Resets the environment on the first row, in a child process; returns the prompt's ids."""
    assert config.environment is not None
    assert sets.tokenizer is not None
    children = EnvironmentChildren(config.environment, _MEMORY)
    _, data = config.rows_section
    task = task_of(next(filter(None, sets.rows.values()))[0], sets.tokenizer)
    try:
        await children.start(_LOAD_S)
        async with children.place() as child:
            reply = await child.call(0, "reset", task, config.run.seed)
        history = config.environment.history
        context = config.rollout.max_model_len
        renderer = ChatRenderer(sets.tokenizer, data.chat_template_kwargs, history=history, context=context)
        ids = renderer.begin(reply.observation.messages, reply.tools)
    finally:
        await children.close()
    if len(ids) >= config.rollout.max_model_len:
        room = f"no room for a turn within rollout.max_model_len = {config.rollout.max_model_len}"
        raise ValueError(f"its first prompt of {len(ids)} tokens leaves {room}")
    return ids


def _problems(
    where: str,
    functions: Sequence[RewardFunction],
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    reward: Reward,
) -> Iterator[Problem]:
    if not functions or not prompts:  # a standalone evaluation has no prompts for reward.functions
        return
    scorer = RuleScorer(functions, None, reward.model_copy(update={"retries": 0}), _MEMORY)
    tried = [prompts[0], prompts[len(prompts) // 2], prompts[-1]]
    try:
        scorer.start(time.monotonic() + _LOAD_S)
        for index, function in enumerate(functions):
            copies = 1 if function.unit == "response" else 2
            failed = _call(scorer, index, tried, tokenizer, copies)
            if failed is not None:
                reason = "\n      ".join(failed.failure.reason.splitlines()[-_LINES:])
                rule = f"must score a response; it failed on the prompt {failed.prompt_id!r}"
                usual = "correct the function, or what it calls; docs/rewards.md has its signature"
                fix = adapter_fix(function, resolve(function.name)) or usual
                field = f"{where}.{index}.name"
                yield Problem(field, function.name, f"{rule}:\n      {reason}", fix)
    except RunError as error:
        yield Problem(where, "", str(error), "correct the module")
    finally:
        scorer.close()


def _call(
    scorer: RuleScorer, function: int, prompts: Sequence[Prompt], tokenizer: Tokenizer | None, copies: int
) -> Unscored | None:
    """Calls a function until it scores a response or takes too long; else returns the first failure."""
    first: Unscored | None = None
    for row, prompt in enumerate(prompts):
        response: Sequence[int] = prompt.token_ids
        if row == 1 and tokenizer is not None:
            response = _text(prompt, tokenizer)
        completions = [_completion(prompt, response, tokenizer)] * copies
        _, failures = scorer.score({"": function}, completions, math.inf)
        if not failures:
            return None
        failed = next(iter(failures.values()))
        first = first or failed
        if failed.failure.kind == "time":
            return failed
    return first


def _text(prompt: Prompt, tokenizer: Tokenizer) -> Sequence[int]:
    """Returns the first text or number of a prompt's row, such as an answer; else the prompt."""
    for value in prompt.fields.values():
        if isinstance(value, str | int | float):
            return tokenizer.encode(str(value)[:_CHARACTERS])
    return prompt.token_ids


def _completion(prompt: Prompt, response: Sequence[int], tokenizer: Tokenizer | None) -> Completion:
    texts = ["", ""]
    if tokenizer is not None:
        texts = [tokenizer.decode(ids) for ids in (prompt.token_ids, response)]
    return Completion(
        prompt_id=prompt.prompt_id,
        prompt=texts[0],
        response=texts[1],
        prompt_ids=prompt.token_ids,
        response_ids=tuple(response),
        finished=True,
        fields=prompt.fields,
        messages=prompt.messages,
    )
