"""Functions named by a configuration: found from the working directory, and checked against their arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.plugins import check_options, resolve, suggestion

HERE = "tests.own_functions"


def test_a_function_is_found_by_module_and_name() -> None:
    from tests import own_functions

    assert resolve(f"{HERE}:quadratic") is own_functions.quadratic


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("quadratic", "written as package.module:function"),
        (":quadratic", "written as package.module:function"),
        (f"{HERE}:", "written as package.module:function"),
        ("nowhere_at_all:f", "No module named 'nowhere_at_all'"),
        (f"{HERE}:cubic", f"{HERE} has no 'cubic'"),
        (f"{HERE}:NOT_A_FUNCTION", "of the type int"),
        (f"{HERE}:Samples", "not a class"),
        (f"{HERE}:later", "not a coroutine"),
        ("tests.rewards.broken:anything", "Traceback"),
    ],
)
def test_what_is_not_a_function_is_reported(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule.replace("'", ".")):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("of_mine.py:double", "write of_mine:double"),
        ("./below/of_mine.py:double", "write below.of_mine:double"),
        ("of_mine.double", "write of_mine:double"),
        ("./of_mine.py", "write of_mine:NAME"),
        ("nowhere_at_all:f", None),
        ("quadratic", None),
    ],
)
def test_a_malformed_function_path_has_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fix: str | None
) -> None:
    (tmp_path / "of_mine.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"function|module"):
        resolve(name)
    assert suggestion(name) == fix


def test_a_module_that_exits_the_program_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_mine_that_ends.py").write_text("import sys\n\nsys.exit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be imported:(.|\n)*SystemExit: no licence"):
        resolve("of_mine_that_ends:f")


@pytest.mark.process
def test_the_working_directory_is_searched(tmp_path: Path) -> None:
    (tmp_path / "of_mine.py").write_text("def double(x):\n    return 2 * x\n")
    code = "from megarl.plugins import resolve; print(resolve('of_mine:double')(21))"
    root = str(Path(__file__).parents[1])
    # -P: the directory of the script is not on the path, as in an installed command
    run = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"]
    assert subprocess.run(run, capture_output=True, text=True, check=True, cwd=tmp_path).stdout == "42\n"


def given(x: float, y: float, *, mask: bool, power: int, scale: float = 1.0) -> float:
    return x * y**power * scale if mask else 0.0


@pytest.mark.parametrize("options", [{"power": 2}, {"power": 2, "scale": 0.5}])
def test_options_that_fit_are_accepted(options: dict[str, float]) -> None:
    check_options(given, options, name="my:given", positional=2, given=("mask",))


@pytest.mark.parametrize(
    ("options", "positional", "message"),
    [
        ({}, 2, "missing a required( keyword-only)? argument: 'power'"),
        ({"power": 2, "exponent": 3}, 2, "unexpected keyword argument 'exponent'"),
        ({"power": 2, "x": 1}, 2, "multiple values for argument 'x'"),
        ({"power": 2, "mask": True}, 2, "mask is given by every call"),
        ({"power": 2}, 1, "missing a required argument: 'y'"),
        ({"power": 2}, 3, "too many positional arguments"),
    ],
)
def test_options_that_do_not_fit_are_reported_with_the_signature(
    options: dict[str, float], positional: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_options(given, options, name="my:given", positional=positional, given=("mask",))
    assert str(caught.value).startswith("arguments of my:given(")


def test_a_function_without_a_signature_is_accepted() -> None:
    check_options(dict.update, {"anything": 1}, name="dict:update", positional=1)
