"""docs/algorithms.md is complete and up to date, and its examples work."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.algos import registry
from megarl.algos.group_advantages import Samples
from megarl.algos.normalization import Groups
from megarl.algos.policy_loss import LossTerms
from megarl.config import load
from megarl.config.schema import stage_classes
from megarl.config.schema.schema_walk import choices, fields, section, type_of
from megarl.preflight.user_functions import check_own_functions
from megarl.stages.ppo.config import PPOConfig
from tools.docs.algorithms_page import PARTS, markdown

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text(encoding="utf-8")


def entries(page: str) -> Iterator[tuple[str, str]]:
    """The items of a page, by name, with their text."""
    for text in page.split("\n### ")[1:]:
        name, _, below = text.partition("\n")
        for own in re.findall(r"`([^`]+)`", name):
            yield own, below.split("\n## ")[0]


def test_the_page_is_up_to_date() -> None:
    assert markdown() == PAGE, "run make docs"


def test_every_registered_name_is_documented_with_options_and_source() -> None:
    for kind in registry.KINDS:
        chapter = PAGE.split(f"\n## {kind.title}: ")[1].split("\n## ")[0]
        assert f"`{kind.field}`" in chapter.splitlines()[0]
        items = dict(entries(chapter))
        assert set(items) == set(kind.functions)
        for name in kind.functions:
            parameters = inspect.signature(kind.function(name)).parameters.values()
            own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
            told = set(re.findall(r"`(\w+)`", items[name].partition("\n\nSource")[0]))
            assert set(own) - {*kind.keywords, *kind.presets.get(name, ()), "dtype"} <= told, name


def test_every_item_has_a_source() -> None:
    assert [name for name, text in entries(PAGE) if "\nSource: " not in text] == []


def test_kinds_lists_every_table_of_the_registry() -> None:
    tables = [table for table in vars(registry).values() if isinstance(table, registry.Kind)]
    assert tables == list(registry.KINDS)


PLACES = ", ".join(place for fields in PARTS.values() for place in fields.values())


@pytest.mark.parametrize("place", PLACES.split(", "))
def test_the_page_names_existing_fields(place: str) -> None:
    """A named choice of a field is among its names, its values, or (of reward functions) the rules."""

    from megarl.rewards.functions import RULES

    name, _, choice = place.partition(": ")
    found = [info for schema in stage_classes().values() if (info := field(schema, name.split("."))) is not None]
    assert found, f"no stage has {name}"
    if name == "reward.functions":
        assert choice in RULES
    elif choice:
        assert any(choice in {*choices(info), *re.findall(r"'(\w+)'", str(info))} for info in found)


def field(schema: object, path: list[str]) -> object:
    """The type of a field; None where the schema does not have it."""
    owner = section(schema)
    known = fields(owner) if owner is not None else {}
    if path[0] not in known:
        return None
    inside = type_of(known[path[0]])
    return inside if len(path) == 1 else field(inside, path[1:])


def test_sections_describe_the_arguments_of_custom_functions_in_their_order() -> None:
    for kind in filter(lambda kind: kind.custom, registry.KINDS):
        called = [*kind.arguments, *(name for name, _ in kind.further), *kind.keywords]
        opening = PAGE.split(f"\n## {kind.title}: ")[1].split("\n### ")[0]
        listed = re.findall(r"^- `(\w+)`: ", opening, flags=re.MULTILINE)
        assert called == ["samples"] or called == listed[: len(called)]


def test_records_are_documented_with_all_fields() -> None:
    for record in (Samples, Groups, LossTerms):
        below = PAGE.split(f"\n`{record.__module__}.{record.__name__}`: ")[1]
        told = re.findall(r"^- `(\w+)`: ", below.split("\n\n")[1], flags=re.MULTILINE)
        assert told == [own.name for own in dataclasses.fields(record)]


# ---- the examples


def example(file: str, debug: str, directory: Path) -> PPOConfig:
    """A debug run with the example of that file, in a directory that contains the file."""
    found = re.search(rf"`{file}`.*?```python\n(.*?)```.*?```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    assert found is not None
    (directory / "configs").symlink_to(REPOSITORY / "configs")
    (directory / file).write_text(found[1])
    (directory / "run.yaml").write_text(f"defaults: [{REPOSITORY / 'configs' / 'debug' / debug}]\n{found[2]}")
    config = load(directory / "run.yaml")
    assert isinstance(config, PPOConfig)
    assert check_own_functions(config) == []
    return config


def test_the_example_advantage_computes_what_it_documents(user_directory: Path) -> None:
    chosen = example("my_advantages.py", "grpo.yaml", user_directory).algo.advantage
    compare = registry.bound(registry.GROUP_ADVANTAGES, chosen.name, chosen.options)
    missing = float("nan")
    samples = Samples(
        scores=torch.tensor([1.0, 5.0, 4.0, missing, 2.0, missing, 8.0, 2.0]),
        groups=torch.tensor([0, 1, 0, 0, 0, 1, 2, 2]),
        lengths=torch.full((8,), 3),
        finished=torch.ones(8, dtype=torch.bool),
        scored=torch.tensor([True, True, True, False, True, False, True, True]),
    )
    # medians: 2 of 1, 4, 2; 5 of one; 5 of 8, 2; each difference times 2
    assert compare(samples).tolist() == [-2.0, 0.0, 4.0, 0.0, 0.0, 0.0, 6.0, -6.0]


def test_the_example_loss_computes_what_it_documents(user_directory: Path) -> None:
    chosen = example("my_losses.py", "ppo.yaml", user_directory).algo.policy_loss
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
