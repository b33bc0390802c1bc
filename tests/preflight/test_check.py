"""Refusals before anything starts, beyond the rules of the configuration itself."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.config import ConfigError, load
from megarl.data.tokenizer import load_tokenizer
from megarl.preflight import template_trial
from megarl.preflight.check import check
from megarl.run.directory import write_random_model
from tests.config.debug import MIXTURE
from tests.data.rows import chatml_tokenizer, jsonl
from tests.megatron.tiny import save_model
from tests.weights.models import deepseek_v3_config, gpt_oss_config, qwen3_5_whole_config

DEBUG = Path(__file__).parents[2] / "configs" / "debug" / "ppo.yaml"
MODEL = "model.random.config"
OVERLONG = "{name: soft_overlong, args: {max_tokens: 32, buffer_tokens: 32}}"
RULES = ["groups.train.roles.reward=null", f"reward.functions=[{OVERLONG}]"]
"""No reward model: beside a checkpoint it would need one of its own."""
LLAMA = [f"{MODEL}.model_type=llama", f"{MODEL}.architectures=[LlamaForCausalLM]"]


def refusal(*overrides: str, stage: str = "ppo") -> str:
    with pytest.raises(ConfigError) as error:
        check(load(DEBUG.with_stem(stage), list(overrides)))
    return str(error.value)


def prompts(tmp_path: Path, *lengths: int) -> list[str]:
    source = jsonl(tmp_path, [{"token_ids": [3] * length} for length in lengths], "prompts.jsonl")
    return ["data.random=null", f"data.prompts={source.path}"]


def checkpoint(directory: Path, **fields: Any) -> Path:
    directory.mkdir()
    config = {**load(DEBUG).model.hf_config(), **fields}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the debug model, with files and a tokenizer."""
    directory = tmp_path_factory.mktemp("whole") / "model"
    random = load(DEBUG).model.random
    assert random is not None
    write_random_model(random, directory)
    chatml_tokenizer(directory)
    end = load_tokenizer(directory).end_token_id
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    return directory


def test_layers_that_cannot_compute_the_model_are_refused() -> None:
    text = refusal("model.layers=transformer_engine", "cluster.device=cuda", *LLAMA, f"{MODEL}.head_dim=36")
    assert "model.layers" in text
    assert "products of float32" in text
    assert "heads of 36" in text


@pytest.mark.parametrize(
    ("stage", "overrides", "rows"),
    [
        ("ppo", [], {"data.prompts": 32}),
        ("ppo", [*LLAMA, f"{MODEL}.num_key_value_heads=null"], {"data.prompts": 32}),
        ("sft", [], {"data.train": 32, "data.evaluation": 8}),
        ("reward_model", [], {"data.train": 32, "data.evaluation": 8, "normalisation.prompts": 32}),
        ("raft", [], {"data.prompts": 32}),
    ],
)
def test_the_debug_runs_pass(stage: str, overrides: list[str], rows: dict[str, int]) -> None:
    found = check(load(DEBUG.with_stem(stage), overrides)).rows
    assert {field: len(items) for field, items in found.items()} == rows


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{MODEL}.vocab_size=abc"], "vocab_size: 'abc' is not a positive integer"),
        ([f"{MODEL}.rope_theta=null"], "rope_theta: missing"),
        ([f"{MODEL}.hidden_act=gelu"], "hidden_act"),
        ([f"{MODEL}.dtype=float16"], "float16"),
        (["model.vocab_size=101"], "at most the 100 ids"),
    ],
)
def test_a_model_that_cannot_run_is_refused(overrides: list[str], said: str) -> None:
    assert said in refusal(*overrides)


ACTOR = "groups.train.roles.actor"
EXPERTS = [*MIXTURE, f"{MODEL}.architectures=[MixtralForCausalLM]"]
LONGROPE = (
    f"{MODEL}={{model_type: phi3, architectures: [Phi3ForCausalLM], original_max_position_embeddings: 64, "
    f"rope_scaling: {{rope_type: longrope, short_factor: {[1.0] * 16}, long_factor: {[2.0] * 16}}}}}"
)
PTX = ["ptx={data: tests/e2e/texts.jsonl, max_tokens: 16, sequences_per_mini_batch: 3, coef: 0.1}"]
FIVE_HEADS = f"{MODEL}={{num_attention_heads: 5, num_key_value_heads: 5, hidden_size: 160}}"
DELTA_NETS = [
    *(f"{MODEL}.model_type=qwen3_5_text", f"{MODEL}.architectures=[Qwen3_5ForCausalLM]", f"{MODEL}.dtype=bfloat16"),
    *(f"{MODEL}.head_dim=32", f"{MODEL}.linear_key_head_dim=32", f"{MODEL}.linear_value_head_dim=64"),
]
OSS = [f"{MODEL}={json.dumps(gpt_oss_config())}"]
LATENT = [f"{MODEL}={json.dumps(deepseek_v3_config())}"]


@pytest.mark.parametrize(
    ("overrides", "field", "said"),
    [
        ([FIVE_HEADS], ACTOR, "tp 2 does not divide the 5 attention heads"),
        (
            [f"{MODEL}={{num_attention_heads: 4, num_key_value_heads: 3}}"],
            "model.random.config",
            "num_key_value_heads: 3 does not divide the 4 heads",
        ),
        ([f"{MODEL}.intermediate_size=127"], ACTOR, "tp 2 does not divide the 127 MLP channels"),
        ([f"{MODEL}.num_hidden_layers=1"], ACTOR, "2 stages x 1 chunks are more than the 1 layers"),
        ([*EXPERTS, f"{ACTOR}.sequence_parallel=false"], f"{ACTOR}.sequence_parallel", "with tp above 1 needs"),
        (["rollout.devices=0-2", "rollout.tp=3"], "rollout.tp", "tp 3 does not divide the 4 attention heads"),
        ([f"{MODEL}.hidden_size=64"], "cluster.device", "the model's have 16"),
        ([*LLAMA, f"{MODEL}.head_dim=48"], "cluster.device", "the model's have 48"),
        (["rollout.max_model_len=129"], "rollout.max_model_len", "at most the 128 positions of the model"),
        (
            ["rollout.max_model_len=126", "rollout.speculative=3"],
            "rollout.speculative",
            "twice the drafts are at most the 128 positions of the model",
        ),
        (DELTA_NETS, "cluster.device", "take heads of 64 and 128; the model's have 32 and 64"),
        ([*DELTA_NETS, "model.random.config.dtype=float32"], "cluster.device", "compute in bfloat16 alone"),
        ([*DELTA_NETS, f"{MODEL}.num_key_value_heads=1"], ACTOR, "tp 2 exceeds the 1 KV heads of gated attention"),
        (
            [f"{MODEL}={json.dumps(qwen3_5_whole_config())}"],
            "model.random.config",
            "a random model is a decoder alone",
        ),
        ([*DELTA_NETS, f"{MODEL}.linear_conv_kernel_dim=3"], "cluster.device", "take convolutions of 4 positions"),
        ([*DELTA_NETS, "rollout.speculative=2"], "rollout.speculative", "not supported for models with gated"),
        (LATENT, "cluster.device", "takes kv_lora_rank, qk_rope_head_dim of (512, 64); these are (12, 4)"),
        ([*LATENT, "rollout.speculative=2"], "rollout.speculative", "not supported for models with latent attention"),
        (OSS, "rollout.tp", "takes multiples of 32 channels of an expert, and a rank has 12"),
        ([f"{MODEL}.model_type=opt"], "model.random.config", "opt"),
        ([LONGROPE], "rollout.max_model_len", "65 positions, for which longrope takes other factors than for 64"),
        (
            [LONGROPE, "rollout.max_model_len=40", *PTX, "ptx.max_tokens=65"],
            "ptx.max_tokens",
            "engines of 41 positions take longrope's factors for up to 64",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_layout_are_refused(overrides: list[str], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load(DEBUG, overrides, check))
    assert said in "; ".join(problem.rule for problem in caught.value.problems if problem.field == field)


def test_a_draft_model_has_the_models_ids_and_positions(tmp_path: Path) -> None:
    drafts = ["rollout.speculative=2", f"rollout.draft_model={tmp_path / 'draft'}"]
    save_model(tmp_path / "draft", "llama", vocab_size=100, max_position_embeddings=128)
    check(load(DEBUG, drafts))
    save_model(tmp_path / "draft", "llama", vocab_size=120, max_position_embeddings=64)
    said = refusal(*drafts)
    assert "a model of 100 token ids, as the model that it drafts for; it has 120" in said
    assert "twice the drafts are at most the 64 positions" in said


def test_sizes_of_other_stages_and_roles_are_checked(tmp_path: Path) -> None:
    assert "at most the 128 positions of the model" in refusal(
        "data.max_tokens=129", f"{ACTOR}.tokens_per_micro_batch=129", stage="sft"
    )
    text = refusal(FIVE_HEADS, stage="reward_model")
    assert "tp 2 does not divide the 5 attention heads" in text
    other = checkpoint(tmp_path / "other", num_attention_heads=3, num_key_value_heads=3, max_position_embeddings=63)
    text = refusal(f"critic.path={other}", "groups.train.roles.critic={tp: 2, pp: 1}")
    assert "tp 2 does not divide the 3 attention heads" in text
    assert "at most the 63 positions of the critic" in text


@pytest.mark.parametrize(
    ("role", "fields", "rule"),
    [("reward", {}, "score head"), ("critic", {"dtype": "float16"}, "training in float16")],
)
def test_a_checkpoint_fits_its_role(tmp_path: Path, role: str, fields: dict[str, Any], rule: str) -> None:
    path = checkpoint(tmp_path / "other", **fields)
    text = refusal(f"{role}.path={path}")
    assert f"{role}.path" in text
    assert rule in text


@pytest.mark.process
def test_a_checkpoint_has_the_files_of_its_configuration(whole: Path, tmp_path: Path) -> None:
    model = "model={{path: {}, random: null}}".format
    check(load(DEBUG, [*RULES, model(whole), f"critic.path={whole}"]))
    assert "neither model.safetensors nor" in refusal(*RULES, model(checkpoint(tmp_path / "bare")))
    shallow = shutil.copytree(whole, tmp_path / "shallow")
    fields = json.loads((shallow / "config.json").read_text())
    (shallow / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 2, "layer_types": None}))
    assert "unknown: model.layers.2." in refusal(f"critic.path={shallow}")
    cut = shutil.copytree(whole, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes()[:1000])
    assert "model.safetensors is corrupted" in refusal(*RULES, model(cut))


@pytest.mark.process
def test_a_tokenizer_fits_the_model(whole: Path, tmp_path: Path) -> None:
    ids = len(load_tokenizer(whole))
    text = refusal(f"model.tokenizer={whole}", f"model.vocab_size={ids - 1}")
    assert f"has ids up to {ids - 1}, the model's in use end at {ids - 2}" in text
    assert f"model.tokenizer = {tmp_path}" in refusal(f"model.tokenizer={tmp_path}")
    bare = shutil.copytree(whole, tmp_path / "bare", ignore=shutil.ignore_patterns("chat_template*"))
    rows = jsonl(tmp_path, [{"prompt": "hello"}] * 8)
    asked = ["data.random=null", f"data.prompts={rows.path}", "data.chat_template=true"]
    check(load(DEBUG, [*asked, f"model.tokenizer={whole}"]))
    assert "has no chat template" in refusal(*asked, f"model.tokenizer={bare}")


@pytest.mark.process
@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "it takes longer than 1 s"),
        ("{{ 'x' * 10**9 }}", "it takes more than 256.0 MiB of memory"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}", ""),
    ],
)
def test_a_chat_template_is_tried_with_limits(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, told: str
) -> None:
    if "longer" in told:
        monkeypatch.setattr(template_trial, "_SECONDS", 1.0)
    hostile = shutil.copytree(whole, tmp_path / "hostile")
    (hostile / "chat_template.jinja").write_text(template)
    if not told:
        check(load(DEBUG, [f"model.tokenizer={hostile}"]))
        return
    text = refusal(f"model.tokenizer={hostile}")
    assert f"the chat template cannot write a short chat: {told}" in text
    assert "correct its files, or name another tokenizer" in text


@pytest.mark.process
def test_roles_read_the_same_tokens(whole: Path, tmp_path: Path) -> None:
    other = shutil.copytree(whole, tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    tokens = json.loads(text)["model"]["vocab"]
    one, two = list(tokens)[:2]
    swapped = {**tokens, one: tokens[two], two: tokens[one]}
    (other / "tokenizer.json").write_text(json.dumps({**json.loads(text), "model": {"vocab": swapped}}))
    given = [*RULES, "model.random=null", f"model.path={whole}"]
    check(load(DEBUG, [*given, f"critic.path={whole}"]))
    assert f"its tokenizer must be the one of {whole}" in refusal(*given, f"critic.path={other}")
    said = refusal(*given, f"reference.path={other}")
    size = len(tokens)
    assert len(set(re.findall(rf"{size} tokens [0-9a-f]{{12}}", said))) == 2, "a fingerprint of each"


@pytest.mark.process
def test_engine_stop_tokens_agree_with_the_tokenizers(whole: Path, tmp_path: Path) -> None:
    end = load_tokenizer(whole).end_token_id
    other = shutil.copytree(whole, tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    text = refusal(*RULES, "model.random=null", f"model.path={other}")
    assert f"the engines stop at [0], not at the tokenizer's end token, {end}" in text
    assert f"add {end}" in text
    given = [*RULES, "model.random=null", f"model.path={other}", f"rollout.stop_token_ids=[{end}]"]
    check(load(DEBUG, given))


def test_stop_texts_need_a_tokenizer(whole: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(whole, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    model = f"model={{path: {bare}, random: null}}"
    assert "rollout.stop needs a tokenizer" in refusal(*RULES, model, "rollout.stop=[x]")


@pytest.mark.parametrize(
    ("lengths", "rule"),
    [
        ([2] * 8 + [33], "line 9: 33 tokens are too many: at most 32 fit"),
        ([2] * 3, "must have rows for data.prompts_per_step = 8: it has 3 usable ones"),
    ],
)
def test_prompts_that_do_not_suffice_are_refused(tmp_path: Path, lengths: list[int], rule: str) -> None:
    assert rule in refusal(*prompts(tmp_path, *lengths))


@pytest.mark.parametrize(
    ("stage", "field", "rules"),
    [
        ("sft", "data.train", "data.too_long, data.empty"),
        ("reward_model", "data.train", "data.too_long, data.empty, data.equal"),
        ("eval", "evaluation.prompts", "evaluation.too_long"),
    ],
)
def test_broken_rows_are_reported_with_the_stages_rules(tmp_path: Path, stage: str, field: str, rules: str) -> None:
    source = jsonl(tmp_path, [{"prompt_ids": [1] * 99, "response_ids": [2], "chosen_ids": [2], "rejected_ids": [3]}])
    assert refusal(f"{field}={source.path}", stage=stage).splitlines()[-1].endswith(f": {rules}")


@pytest.mark.parametrize(
    ("stage", "field", "row"),
    [
        ("sft", "data.train", {"prompt_ids": [1]}),
        ("sft", "data.evaluation", {"prompt_ids": [1], "response_ids": [96]}),
        ("reward_model", "data.train", {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [2]}),
        ("reward_model", "data.evaluation", {"prompt_ids": [1], "chosen_ids": [2]}),
        ("reward_model", "normalisation.prompts", {"prompt_ids": [1] * 33}),
        ("ppo", "evaluation.prompts", {"prompt_ids": "x"}),
    ],
)
def test_every_source_of_every_stage_is_read(tmp_path: Path, stage: str, field: str, row: dict[str, Any]) -> None:
    source = jsonl(tmp_path, [row])
    text = refusal(f"{field}={{path: {source.path}}}", stage=stage)
    assert text.startswith("configuration: 1 problem\n")
    assert f"{field} = {source.path}" in text
    assert "line 1: " in text


def test_preferences_are_read_as_their_loss_needs_them(tmp_path: Path) -> None:
    row = {"prompt_ids": [1], "candidates_ids": [[2], [3], [4]], "best": 2}
    source = jsonl(tmp_path, [row, {**row, "best": 0}, {**row, "candidates_ids": [[2], [2], [2]]}])
    overrides = ["reward.loss=best_of_n", "data.evaluation=null", f"data.train={{path: {source.path}}}"]
    sets = check(load(DEBUG.with_stem("reward_model"), overrides))
    assert [[ids.tolist() for ids in one.responses] for one in sets.rows["data.train"]] == [
        [[4], [2], [3]],
        [[2], [3], [4]],
    ]
    assert sets.left_out.metrics() == {"data/dropped_empty": 0, "data/dropped_equal": 1}
    text = refusal(*overrides, "data.equal=refuse", stage="reward_model")
    assert "line 3: the better response is the same as another" in text
    assert "data.too_long, data.empty, data.equal" in text
    four = jsonl(tmp_path, [{**row, "candidates_ids": [[2], [3], [4], [5]]}], "four.jsonl")
    text = refusal(*overrides, f"data.evaluation={{path: {four.path}}}", stage="reward_model")
    assert "rule: must have 3 candidates a row, as data.train; it has 4" in text
    text = refusal("reward.loss={name: pairwise, margin: true}", stage="reward_model")
    assert "32 of 32 rows are broken:" in text
    assert "pairs.jsonl, line 1 (and 31 more): margin is None" in text


@pytest.mark.parametrize("stage", ["ppo", "raft"])
def test_a_replay_needs_a_recording(tmp_path: Path, stage: str) -> None:
    assert "holds recorded rollouts" in refusal(f"rollout.replay={tmp_path}", stage=stage)


def test_prompts_with_unused_ids_are_refused(tmp_path: Path) -> None:
    assert "token_ids holds 3" in refusal("model.vocab_size=3", *prompts(tmp_path, *[2] * 8))
    found = check(load(DEBUG, ["model.vocab_size=50"])).rows["data.prompts"]
    assert all(max(prompt.token_ids) < 50 for prompt in found)


def test_reward_functions_exist_and_find_their_fields(tmp_path: Path) -> None:
    text = refusal("reward.functions=[{name: exact_mach}, {name: 'nowhere.at:all'}]")
    assert "reward.functions.0.name = exact_mach" in text
    assert "did you mean exact_match?" in text
    assert "reward.functions.1.name = nowhere.at:all" in text
    source = jsonl(tmp_path, [{"prompt_ids": [1]}])
    text = refusal(f"evaluation={{prompts: {source.path}, functions: [{{name: exact_match}}]}}")
    assert "evaluation.functions.0.name = exact_match" in text
    assert "needs a tokenizer" in text


@pytest.mark.parametrize(("where", "taken"), [("reward", "reward_model"), ("evaluation", "score")])
def test_a_function_does_not_hide_the_reward_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, taken: str
) -> None:
    (tmp_path / "mine.py").write_text("def reward_model(answer): return 0.0\nscore = reward_model\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = jsonl(tmp_path, [{"prompt_ids": [1]}])
    prompts = f"prompts: {source.path}, " if where == "evaluation" else ""
    text = refusal(f"{where}={{{prompts}functions: [{{name: 'mine:{taken}'}}]}}")
    assert f"{where}.functions.0.name = mine:{taken}" in text
    assert "rule: none of prompts, response_length" in text


def test_problems_of_all_parts_are_reported_together(tmp_path: Path) -> None:
    """Problems of model, data and rewards do not hide each other."""
    source = jsonl(tmp_path, [{"prompt_ids": [1]}, "{"])
    overrides = [
        f"{MODEL}.hidden_act=gelu",
        "data.random=null",
        f"data.prompts={source.path}",
        "reward.functions=[{name: exact_mach}]",
    ]
    text = refusal(*overrides)
    assert text.startswith("configuration: 3 problems")
    assert "hidden_act" in text
    assert "line 2: not JSON" in text
    assert "exact_mach" in text


def test_rules_and_data_are_reported_together(tmp_path: Path) -> None:
    source = jsonl(tmp_path, [{"prompt_ids": [1]}, "{"])
    overrides = ["run.stepz=3", "data.random=null", f"data.prompts={source.path}"]
    overrides += ["groups.train.roles.actor.tp=3", "reward.path=/nowhere", "groups.b={devices: 0, roles: {actor: {}}}"]
    with pytest.raises(ConfigError) as error:
        load(DEBUG, overrides, check)
    fields = [problem.field for problem in error.value.problems]
    assert {"run.stepz", "groups.train.roles.actor", "groups.b.devices", "reward.path", "data.prompts"} <= set(fields)
    assert fields.count("reward.path") == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.random=null"],
        ["model.path=/nowhere"],
        ["model={path: /nowhere, random: null}"],
        ["data.random=null"],
        ["data.random.min_tokens=99"],
        ["groups.train.roles={actor: null, critic: null, reference: null, reward: null}"],
        ["groups.train.devices=0"],
        ["rollout.max_new_tokens=64"],
        ["critic=null", "reward.path=/nowhere"],
        ["rollout.replay=/nowhere"],
        ["reference={teachers: {math: nowhere}}"],
    ],
    ids=str,
)
def test_a_broken_rule_does_not_crash_later_checks(overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        load(DEBUG, overrides, check)


def test_tracking_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.preflight.check.find_spec", lambda name: None)
    fields = {"wandb": "wandb_project", "mlflow": "mlflow_experiment", "trackio": "trackio_project"}
    told = refusal(*(f"tracking.{field}=mine" for field in fields.values()))
    for package, field in fields.items():
        assert f"tracking.{field} = mine" in told
        assert f"needs the package {package}" in told
        assert f"pip install -e '.[{package}]'" in told


def test_weights_and_biases_needs_a_key_where_it_is_online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", "")
    arguments = ["plan", str(DEBUG), "tracking.wandb_project=mine", f"run.dir={tmp_path / 'run'}"]

    def planned(**variables: str) -> str:
        return CliRunner().invoke(app, arguments, env={**variables, "COLUMNS": "200"}).stderr

    refused = planned()
    assert "tracking.wandb_project = mine" in refused
    assert "run wandb login, or set WANDB_MODE=offline" in refused
    assert not planned(WANDB_API_KEY="k" * 40)
    assert not planned(WANDB_MODE="offline")
    (tmp_path / ".netrc").write_text("machine elsewhere.org login me password p\n")
    assert planned() == refused
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password p\n")
    assert not planned()
    assert planned(WANDB_BASE_URL="https://wandb.mine.org") == refused


def test_missing_files_are_reported_together() -> None:
    """The model, the prompts and a module of functions are all missing; no row was read."""
    overrides = [
        "model={path: /nowhere, random: null, vocab_size: null}",
        "data={random: null, prompts: nowhere.jsonl}",
        *RULES,
    ]
    with pytest.raises(ConfigError) as error:
        load(DEBUG, [*overrides, "reward.functions=[{name: 'nowhere_at_all:f'}]"], check)
    fields = {problem.field for problem in error.value.problems}
    assert fields == {"model.path", "data.prompts", "reward.functions.0.name"}
    assert str(error.value).endswith("\nRows of data are checked once the above is corrected.")


def test_an_invalid_field_defers_the_other_checks() -> None:
    with pytest.raises(ConfigError) as error:
        load(DEBUG, ["run.steps=0", "reward.functions=[{name: exact_mach}]"], check)
    assert [problem.field for problem in error.value.problems] == ["run.steps"]
    assert str(error.value).endswith("Models, rows of data and functions are checked once the above is corrected.")


def test_prompts_that_are_too_long_are_reported_with_the_length_they_need(tmp_path: Path) -> None:
    lengths = [f"rollout.{name}" for name in ("max_new_tokens=32", "max_model_len=30")]
    with pytest.raises(ConfigError) as error:
        load(DEBUG, [*prompts(tmp_path, *[2] * 7, 9), *lengths], check)
    assert "8 of 8 rows are broken; the longest has at least 9 tokens:" in str(error.value)
    assert "2 tokens are too many: at most 0 fit" in str(error.value)
    assert "set it to 32 and the tokens of the longest prompt or more" in str(error.value)
