"""Gateways; `async def` tests run in an event loop of their own."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

from tests.conversations.gateways import gateway_tokenizer


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Characters as tokens, and a chat template with tools."""
    return gateway_tokenizer(tmp_path_factory.mktemp("tokenizer"))
