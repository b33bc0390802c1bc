"""A short run of a recipe, and the same run by the naive program of tests/oracle on the recorded rollouts."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from megarl.data.prompts import random_prompts
from megarl.data.schedule import mini_batch_members
from megarl.data.stream import Stream
from megarl.models import model_spec
from megarl.models.lora import Adapters
from megarl.types import SampleInfo
from tests.e2e.runs import ROOT
from tests.megatron.tiny import peft_state, save_adapters, save_model
from tests.oracle import models, ppo, scores, supervised
from tests.oracle.merged import Merged
from tests.oracle.models import Sample
from tests.random_models import place_random_model

SEED = 1
STEPS = 2
"""In the first, the actor is the reference and the critic knows nothing; the second has all terms."""
EPS = 1e-3
"""Of Adam, in all runs: with the usual ones, a weight whose gradient is rounding moves as far as any other."""
DIVISOR = 7
PROMPTS = {"count": 64, "min_tokens": 2, "max_tokens": 8, "seed": 0}
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6]]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
ADAPTERS = Adapters(rank=4, scale=8.0)
TEACHER = {"vocab_size": 200, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a recipe is run, and its settings for the oracle.

    Args:
        settings: of the oracle, after the recipe's source and the changes of the run.
        changes: what the run has otherwise than the recipe, beside its model, its sizes and its rates.
        critic: where the critic's head is from, None without a critic.
        reference: whether the penalty needs one.
        teacher: whether that is a model of another size and vocabulary, and nothing scores.
        divisor, shift: of the rule that scores.
        prompts, samples: of a step.
        epochs, mini_batches: of a step.
        keeps: which prompts are learned from, by their scores.
        greedy: whether the likeliest response to each prompt is a baseline.
        critic_first: steps in which the critic alone is trained.
        mixes: whether ``TEXTS`` are mixed in.
        average: whether the average of the actor is exported.
        truncation: the token that ends what is scored, and the index from which on it does.
        adapters: whether adapters are trained, from random ones of rank 4.
        select: the samples that are learned as demonstrations, None for a policy gradient.
        recipe: name of its file, where that is not the case's.
    """

    settings: ppo.Settings
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    critic: str | None = None
    reference: bool = False
    teacher: bool = False
    divisor: int = DIVISOR
    shift: float = 0.0
    prompts: int = 4
    samples: int = 4
    epochs: int = 1
    mini_batches: int = 2
    keeps: Callable[[Sequence[float]], bool] = lambda _: True
    greedy: bool = False
    critic_first: int = 0
    mixes: bool = False
    average: bool = False
    truncation: tuple[int, int] | None = None
    adapters: bool = False
    select: Callable[[Sequence[Sample]], list[Sample]] | None = None
    recipe: str | None = None


def prepare(name: str, case: Case, directory: Path) -> None:
    """Writes what the run of a case needs into a directory. Not in a thread: transformers patches torch meanwhile."""
    if case.critic == "loaded":
        reward_model(directory / "judge")
    if case.teacher:
        save_model(directory / "teacher", "llama", **TEACHER)
    if case.mixes:
        rows = [json.dumps({"prompt_ids": ids[:1], "response_ids": ids[1:]}) for ids in TEXTS]
        (directory / "texts.jsonl").write_text("\n".join(rows) + "\n")
    overlay = _merged(_sizes(case.recipe or name, case, directory), case.changes)
    if case.adapters:
        spec = model_spec(MODEL)
        save_adapters(spec, ADAPTERS, directory / "adapters")
        overlay["actor"]["lora"] = {"rank": ADAPTERS.rank, "path": str(directory / "adapters")}
    (directory / "run.yaml").write_text(yaml.safe_dump(overlay))
    place_random_model(directory / "run.yaml")


@contextmanager
def running(directories: Sequence[Path]) -> Iterator[Sequence[Future[Path]]]:
    """Runs recipes one after the other, each for two steps in a directory that is prepared, in one program.

    Each future has its directory when the run has ended, with ``run`` and ``recorded`` in it, or says what went wrong.
    """
    futures: list[Future[Path]] = [Future() for _ in directories]
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as temporary,
        ThreadPoolExecutor(1) as executor,
    ):  # Ray has sockets there
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.recipe_runs", *map(str, directories)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": temporary, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        executor.submit(_read_statuses, program, directories, futures)
        try:
            yield futures
        finally:
            program.terminate()
            program.wait()


def _read_statuses(
    program: subprocess.Popen[str], directories: Sequence[Path], futures: Sequence[Future[Path]]
) -> None:
    """Reads the exit status of each run as it ends."""
    assert program.stdout is not None
    for directory, future in zip(directories, futures, strict=True):
        status = program.stdout.readline().strip()
        if status == "0":
            future.set_result(directory)
        else:
            output = directory / "output.txt"
            said = output.read_text() if output.exists() else "it has not begun"
            future.set_exception(RuntimeError(f"the run ended with {status or 'its program'}:\n{said}"))


def _sizes(name: str, case: Case, directory: Path) -> dict[str, Any]:
    """A run's settings beside its recipe: the model, two devices, few and short samples, high learning rates."""
    role = {"tokens_per_micro_batch": 64}
    roles = ["actor", *["critic"] * (case.critic is not None), *["reference"] * case.reference]
    moving = {"lr": 2e-3, "eps": EPS, "schedule": "constant", "warmup": 0.0, "final_lr": 0.0}
    overlay: dict[str, Any] = {
        "defaults": [str(ROOT / "configs/recipes" / f"{name}.yaml")],
        "run": {"dir": str(directory / "run"), "steps": STEPS, "seed": SEED},
        "model": {"random": {"seed": 0, "config": MODEL}},
        "cluster": {"device": "cpu", "devices_per_node": 2, "object_store_mib": 128},
        "groups": {"train": {"devices": 0, "roles": dict.fromkeys(roles, role)}},
        "rollout": {
            "devices": 1,
            "max_new_tokens": 12,
            "max_model_len": 24,
            "kv_cache_mib": 32,
            "record": str(directory / "recorded"),
        },
        "data": {
            "random": PROMPTS,
            "prompts_per_step": case.prompts,
            "samples_per_prompt": case.samples,
        },
        "algo": {"ppo_epochs": case.epochs, "mini_batches": case.mini_batches},
        "actor": {"optimizer": moving},
        "reward": {
            "functions": [{"name": "tests.e2e.rules:remainder", "args": {"divisor": case.divisor, "shift": case.shift}}]
        },
        "tracking": {"tensorboard": False},
    }
    if case.teacher:
        overlay["reference"] = {"path": str(directory / "teacher")}
        del overlay["reward"]
    if case.critic is not None:
        overlay["critic"] = {"optimizer": moving}
    if case.critic == "loaded":
        overlay["critic"]["path"] = str(directory / "judge")
    if case.mixes:
        texts = {"data": str(directory / "texts.jsonl"), "max_tokens": 16, "sequences_per_mini_batch": len(TEXTS)}
        overlay["ptx"] = texts
    return overlay


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {**one, **other}
    for key in one.keys() & other.keys():
        if isinstance(one[key], Mapping) and isinstance(other[key], Mapping):
            both[key] = _merged(one[key], other[key])
    return both


def reward_model(directory: Path) -> None:
    """Writes a model with a score head."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    fields = {key: value for key, value in MODEL.items() if key not in ("architectures", "model_type", "dtype")}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = AutoConfig.for_model("llama", **fields, num_labels=1)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)


# ---- the same by the oracle


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the oracle makes of the recorded rollouts.

    Args:
        actor_steps, critic_steps: all of them.
        actor: after the last.
        start: its weights before the first.
        average: of its weights.
        left_out: discarded prompts.
        answered: the samples of every step.
        selected: those of them that are learned as demonstrations.
    """

    actor_steps: Sequence[ppo.Step]
    critic_steps: Sequence[ppo.Step]
    actor: nn.Module
    start: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    left_out: int
    answered: Sequence[Sequence[Sample]]
    selected: Sequence[Sequence[Sample]]


def naive(case: Case, directory: Path) -> Expected:
    """The same run by the oracle."""
    own = case.settings
    settings = replace(own, actor=replace(own.actor, eps=EPS), critic=own.critic and replace(own.critic, eps=EPS))
    config = json.loads((directory / "run/model/config.json").read_text())
    state = load_file(directory / "run/model/model.safetensors")
    reference = actor = models.causal_lm(config, state)
    if case.adapters:
        state = peft_state(directory / "adapters")
        actor = Merged(copy.deepcopy(reference), state, ADAPTERS.scale)
    answered = [recorded(directory / "recorded", step, case) for step in range(1, STEPS + 1)]
    samples = [learned(own, case) for own in answered]
    if case.select is not None:
        selected = [case.select(own) for own in samples]
        batches = [
            [sample for sample in own if sample.sample_id in ids]
            for step, own in enumerate(selected, 1)
            for ids in mini_batches(own, case, step)
        ]
        steps, tuned = supervised.fine_tune(actor, batches, settings.actor)
        return Expected(
            actor_steps=steps,
            critic_steps=[],
            actor=tuned,
            start=state,
            average={},
            left_out=0,
            answered=answered,
            selected=selected,
        )
    texts = [Sample(sample_id="", prompt_ids=ids[:1], response_ids=ids[1:]) for ids in TEXTS]
    iterations = [
        ppo.Iteration(
            samples=own,
            mini_batches=(batches := mini_batches(own, case, step)),
            texts=[texts] * len(batches) if case.mixes else [],
            critic_alone=step <= case.critic_first,
        )
        for step, own in enumerate(samples, 1)
    ]
    if case.teacher:
        of_teacher = {**json.loads((directory / "teacher/config.json").read_text()), "vocab_size": MODEL["vocab_size"]}
        weights = load_file(directory / "teacher/model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][: MODEL["vocab_size"]]
        reference = models.causal_lm(of_teacher, weights)
    outcome = ppo.ppo_run(actor, reference, critic_of(case, config, state, directory), iterations, settings)
    return Expected(
        actor_steps=outcome.actor_steps,
        critic_steps=outcome.critic_steps,
        actor=outcome.actor,
        start=state,
        average=outcome.average,
        left_out=(sum(map(len, answered)) - sum(map(len, samples))) // case.samples,
        answered=answered,
        selected=[],
    )


def critic_of(case: Case, config: Mapping[str, Any], state: Mapping[str, Tensor], directory: Path) -> nn.Module | None:
    """The critic before the first step."""
    if case.critic is None:
        return None
    if case.critic == "loaded":
        return models.headed_model(config, load_file(directory / "judge/model.safetensors"))
    body = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    return models.headed_model(config, {**body, "score.weight": torch.zeros(1, config["hidden_size"])})


def recorded(directory: Path, step: int, case: Case) -> list[Sample]:
    """The rollouts of a step, ordered by id, with scores."""
    found: list[Sample] = []
    baselines: dict[str, float] = {}
    for file in sorted(directory.glob("*.npz")):
        own, prompt, index = unquote(file.stem).split("/")
        if int(own) != step:
            continue
        with np.load(file) as stored:
            sample = Sample(
                sample_id=unquote(file.stem),
                prompt_ids=stored["prompt_ids"].tolist(),
                response_ids=stored["response_ids"].tolist(),
                finished=bool(stored["finished"]),
                group=int(prompt.rpartition("-")[2]),
                rollout_logprobs=stored["rollout_logprobs"].tolist(),
            )
        seen = sample if case.truncation is None else scores.truncated(sample, *case.truncation)
        score = sum(seen.response_ids) % case.divisor + case.shift
        if index == "greedy":
            baselines[prompt] = score
        else:
            found.append(replace(sample, score=score, finished=seen.finished))
    if not case.greedy:
        assert not baselines
        return found
    return [replace(sample, greedy_score=baselines[sample.sample_id.split("/")[1]]) for sample in found]


def learned(samples: Sequence[Sample], case: Case) -> list[Sample]:
    """The samples of the first prompts that the recipe keeps, in prompt order."""
    prompts = random_prompts(**PROMPTS, vocab_size=MODEL["vocab_size"])
    kept: list[Sample] = []
    for prompt in Stream(prompts, SEED).next(len(prompts)):
        group = [sample for sample in samples if sample.sample_id.split("/")[1] == prompt.prompt_id]
        shaped = [scores.shaped(sample, case.settings.shapes) for sample in group]
        if group and case.keeps([score for score in shaped if score is not None]):
            kept += group
    return kept[: case.prompts * case.samples]


def mini_batches(samples: Sequence[Sample], case: Case, step: int) -> list[list[str]]:
    """The sample ids of every optimizer step of a step."""
    infos = [
        SampleInfo(
            sample_id=sample.sample_id,
            prompt_id=str(sample.group),
            chunk=0,
            row=row,
            prompt_tokens=len(sample.prompt_ids),
            response_tokens=len(sample.response_ids),
            finished=sample.finished,
        )
        for row, sample in enumerate(samples)
    ]
    return [
        [info.sample_id for info in members]
        for epoch in range(case.epochs)
        for members in mini_batch_members(infos, case.mini_batches, seed=SEED, step=step, epoch=epoch)
    ]
