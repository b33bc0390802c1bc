"""The page of algorithms is that of the functions, complete, and its example works as it stands."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.algos import registry
from megarl.algos.kinds import KINDS
from megarl.algos.parts import PARTS
from megarl.algos.reference import markdown
from megarl.algos.terms import LossTerms
from megarl.config import PPOConfig, load
from megarl.config.schema import STAGES
from megarl.config.schema.walk import choices, fields, section
from megarl.loop.own_functions import check_own_functions

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text(encoding="utf-8")


def entries(page: str) -> Iterator[tuple[str, str]]:
    """The items of a page, by name, with what stands below."""
    for text in page.split("\n### ")[1:]:
        name, _, below = text.partition("\n")
        yield name.strip("`"), below.split("\n## ")[0]


def test_the_page_is_up_to_date() -> None:
    assert markdown() == PAGE, "run make docs"


def test_every_name_of_every_table_is_an_item_with_its_options_and_source() -> None:
    for kind in KINDS:
        chapter = PAGE.split(f"\n## {kind.title}: ")[1].split("\n## ")[0]
        assert f"`{kind.field}`" in chapter.splitlines()[0]
        items = dict(entries(chapter))
        assert list(items) == list(kind.functions)
        for name, function in kind.functions.items():
            own = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
            told = set(re.findall(r"`(\w+)`", items[name].partition("\n\nSource")[0]))
            assert set(own) - {*kind.keywords, "dtype", "log_clamp"} <= told, name


def test_every_item_has_a_source() -> None:
    assert [name for name, text in entries(PAGE) if "\nSource: " not in text] == []


def test_the_registry_has_no_table_besides() -> None:
    tables = [table for name, table in vars(registry).items() if name.isupper() and isinstance(table, dict)]
    assert len(tables) == len(KINDS)
    assert all(any(table is kind.functions for kind in KINDS) for table in tables)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.field}: {part.choice}")
def test_parts_are_asked_for_by_fields_that_there_are(part: object) -> None:
    """A field with a choice has it among its names, its values, or (of reward functions) the rules."""
    from megarl.algos.parts import Part
    from megarl.rewards.registry import RULES

    assert isinstance(part, Part)
    found = [info for schema in STAGES.values() if (info := field(schema, part.field.split("."))) is not None]
    assert found, f"no stage has {part.field}"
    if part.choice is not None and part.field != "reward.functions":
        assert any(part.choice in {*choices(info), *re.findall(r"'(\w+)'", str(info))} for info in found)
    if part.field == "reward.functions":
        assert part.choice in RULES


def field(schema: object, path: list[str]) -> object:
    """The type of a field; None where the schema does not have it."""
    owner = section(schema)
    known = fields(owner) if owner is not None else {}
    if path[0] not in known:
        return None
    inside = known[path[0]].annotation
    return inside if len(path) == 1 else field(inside, path[1:])


# ---- the example


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(found) == 1
    return found[0]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PPOConfig]:
    """The debug run with the example on top of it, in a directory that has its file."""
    (tmp_path / "my_losses.py").write_text(block("python"))
    debug = REPOSITORY / "configs" / "debug" / "ppo.yaml"
    (tmp_path / "run.yaml").write_text(f"defaults: [{debug}]\n{block('yaml')}")
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    config = load(tmp_path / "run.yaml")
    assert isinstance(config, PPOConfig)
    yield config
    sys.path[:] = path
    sys.modules.pop("my_losses", None)


def test_the_example_is_accepted_and_computes_what_it_says(example: PPOConfig) -> None:
    assert check_own_functions(example) == []
    chosen = example.algo.policy_loss
    damped = registry.bound(registry.POLICY_LOSSES, chosen.name, chosen.options)
    new = torch.tensor([[0.5, 0.0]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[True, False]])
    terms = damped(new, old, torch.full((1, 2), 2.0, dtype=torch.float64), mask)
    assert isinstance(terms, LossTerms)
    # r = e^0.5 = 1.6487212707; -2 r + 0.5 (r - 1)^2, and its slope r (-2 + (r - 1))
    assert terms.values[0, 0].item() == pytest.approx(-3.0870229, abs=1e-6)
    terms.values[0, 0].backward()
    assert new.grad is not None
    assert new.grad[0].tolist() == pytest.approx([-2.2278820, 0.0], abs=1e-6)
