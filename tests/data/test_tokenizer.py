"""Special tokens, against transformers itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.schema import Model
from megarl.data.tokenizer import Tokenizer, load_tokenizer, model_tokenizer
from tests.data.rows import LETTERS, llama_tokenizer, transformers_own

CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and +1?"},
]


@pytest.fixture(scope="module")
def tokenizer(llama: Path) -> Tokenizer:
    return load_tokenizer(llama)


@pytest.mark.parametrize("name", ["chatml", "llama"])
def test_a_chat_and_its_response_equal_transformers_whole_chat(name: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(name)
    tokenizer, oracle = load_tokenizer(directory), transformers_own(directory)
    prompt, response = tokenizer.chat(CHAT), tokenizer.respond("3")
    whole = oracle.apply_chat_template([*CHAT, {"role": "assistant", "content": "3"}], return_dict=False)
    assert whole[: len(prompt) + len(response)] == prompt + response
    assert oracle.decode(whole[len(prompt) + len(response) :]).strip() == "", "nothing but white space after the end"
    assert prompt == oracle.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)


def test_the_bos_token_is_added_once(llama: Path) -> None:
    tokenizer, oracle = load_tokenizer(llama), transformers_own(llama)
    bos = oracle.bos_token_id
    assert tokenizer.encode("hi") == oracle("hi").input_ids == [bos, *oracle.convert_tokens_to_ids(["h", "i"])]
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi"), "a text that a template wrote has it already"
    assert tokenizer.chat(CHAT).count(bos) == 1
    assert bos not in tokenizer.respond("hi")


def test_no_bos_token_without_one_in_the_tokenizer(chatml: Path) -> None:
    assert load_tokenizer(chatml).encode("hi") == transformers_own(chatml).convert_tokens_to_ids(["h", "i"])


def test_a_response_has_one_eos_token(chatml: Path) -> None:
    tokenizer = load_tokenizer(chatml)
    end = transformers_own(chatml).convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.end_token_id == end
    assert tokenizer.respond("a")[1:] == [end]
    assert tokenizer.respond("a<|im_end|>") == tokenizer.respond("a")
    assert tokenizer.respond("") == [end]
    with pytest.raises(ValueError, match="must not continue after its end token"):
        tokenizer.respond("a<|im_end|>b")
    with pytest.raises(ValueError, match="must not continue after its end token"):
        tokenizer.respond("a<|im_end|><|im_end|>")


def test_the_tokenizers_truncation_setting_is_ignored(tmp_path: Path, llama: Path) -> None:
    shutil.copytree(llama, tmp_path / "cut")
    backend = tokenizers.Tokenizer.from_file(str(llama / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "cut" / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "cut").encode("hello") == transformers_own(llama)("hello").input_ids


@given(text=st.text(alphabet=LETTERS, max_size=20))
def test_text_comes_back_without_special_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.respond(text)) == text


def test_the_tokenizer_must_fit_the_model(llama: Path) -> None:
    tokenizer = load_tokenizer(llama)
    assert len(tokenizer) == len(transformers_own(llama))
    tokenizer.check(vocab_size=len(tokenizer), chat_template=True)
    last = len(tokenizer) - 1
    with pytest.raises(ValueError, match=f"ids up to {last}, the model's in use end at {last - 1}"):
        tokenizer.check(vocab_size=last)


def test_chats_that_the_template_refuses_are_reported(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ValueError, match="roles must alternate"):
        load_tokenizer(llama).chat(CHAT[:1] * 2)
    plain = load_tokenizer(llama_tokenizer(tmp_path, template=None))
    assert not plain.has_chat_template
    with pytest.raises(ValueError, match="has no chat template"):
        plain.check(vocab_size=1000, chat_template=True)
    with pytest.raises(ValueError, match=r"needs a chat template.*; take an instruct model"):
        plain.chat(CHAT)


def test_unusable_tokenizers_are_refused(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer is there"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(ValueError, match="ends every text; set add_eos_token to false"):
        load_tokenizer(llama_tokenizer(tmp_path / "ends", ends=True))
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(broken)
    endless = tmp_path / "endless"
    shutil.copytree(llama, endless)
    settings = json.loads((endless / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (endless / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="names no end token"):
        load_tokenizer(endless)


def test_the_tokenizer_of_a_configuration(tmp_path: Path, llama: Path, chatml: Path) -> None:
    ends = {directory: load_tokenizer(directory).end_token_id for directory in (llama, chatml)}
    assert ends[llama] == ends[chatml] == 1
    shutil.copytree(llama, tmp_path / "model")
    own = model_tokenizer(Model(path=str(tmp_path / "model")))
    assert own is not None
    assert own.encode("a")[0] == 0, "the model's own begins texts"
    named = model_tokenizer(Model(path=str(tmp_path / "model"), tokenizer=str(chatml)))
    assert named is not None
    assert len(named.encode("a")) == 1, "the named one does not"
    (tmp_path / "bare").mkdir()
    assert model_tokenizer(Model(path=str(tmp_path / "bare"))) is None
    with pytest.raises(ValueError, match="no tokenizer is there"):
        model_tokenizer(Model(tokenizer=str(tmp_path / "bare")))
