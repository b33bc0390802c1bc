"""Texts of models, harnesses and users: they can be printed, and are short."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from megarl.texts import escape_output, printable_name, short_reason


@pytest.mark.process
def test_half_of_a_surrogate_pair_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this process, and by Python processes that it starts."""
    written = io.BytesIO()
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    escape_output()
    print("half \ud800 é", flush=True)
    assert written.getvalue() == "half \\ud800 é\n".encode()
    command = [sys.executable, "-c", r"print('half \ud800 é')"]
    assert subprocess.run(command, capture_output=True, check=True, env=os.environ).stdout == written.getvalue()


def test_a_reason_is_short_and_keeps_its_kind() -> None:
    frames = "\n".join(f"frame {number}" for number in range(1000))
    reason = short_reason(f"Traceback:\n{frames}\nValueError: {'x' * 2_000_000}")
    assert len(reason) < 2100
    assert reason.startswith("Traceback:\nframe 0\n")
    assert reason.rpartition("\n")[2].startswith("ValueError: xxx")
    assert short_reason("two\nlines") == "two\nlines"


def test_a_name_has_no_character_that_cannot_be_written() -> None:
    assert printable_name("m\ud800\x1b[2J\n é") == r"m\ud800\x1b[2J é"
    assert len(printable_name("long" * 1000)) == 200
