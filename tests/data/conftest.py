"""Tokenizers, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data import rows


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rows.chatml_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rows.llama_tokenizer(tmp_path_factory.mktemp("llama"))
