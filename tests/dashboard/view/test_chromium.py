"""The page in a real Chromium: display, interaction, and harmless model texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.dashboard.view.page_export import export
from megarl.dashboard.view.run_view import RunView
from tests.dashboard.status.directories import MadeRun
from tests.dashboard.view.chromium import PROGRAM, Chromium
from tests.dashboard.view.viewed_run import SCRIPT, add_lines, conversations, sample, served, step_samples, viewed_run
from tests.debian import program
from tests.needs import lacking

pytestmark = pytest.mark.process

RESPONSES = "[...document.querySelectorAll('.response .text')].map((text) => text.textContent)"
CHOSEN = "(document.querySelector('.list [aria-selected=true] .name')?.textContent || '')"
STEP = "document.querySelector('.stepper b')?.textContent"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    if program(PROGRAM) is None:
        lacking("no Chromium on this machine: make chromium installs it")
    with Chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Chromium) -> Iterator[Chromium]:
    browser.problems.clear()
    browser.size(1280, 900)
    browser.prefer("light")
    yield browser
    assert not browser.problems
    assert browser.evaluate("window.hacked") is None


def test_the_page_shows_a_run_while_it_trains(page: Chromium, tmp_path: Path) -> None:
    run = viewed_run(tmp_path / "run")
    trace = (run.path / "trace.json").rename(tmp_path / "later.json")
    with served(run) as server:
        try:
            page.open(server.url)
            page.until("document.querySelectorAll('.chart svg').length >= 3")
            assert page.until("document.querySelector('.run').textContent").count("step 20 of 100") == 1
            hover(page)
            run.step(21, ago=1, objective__score=0.75, objective__kl=1.0)
            page.until("document.querySelector('.run').textContent.includes('step 21 of 100')")
            page.until("document.querySelector('.chart .values').textContent === '0.75'")
            page.press("2")
            page.until(f"{STEP} === 'step 20'")
            add_lines(run.path / "samples.jsonl", [*step_samples(21), *conversations(21)])
            run.step(22, ago=0)
            page.until(f"{STEP} === 'step 21'")
            look_at_samples(page, last=21)
            page.evaluate("document.activeElement.blur()")
            page.press("4")
            page.until("document.querySelector('#view .empty')")
            trace.rename(run.path / "trace.json")
            run.step(23, ago=0, data__epoch=0.5)
            page.until("document.querySelector('#view canvas')")
            search_twice(page, "data/epoch")
        finally:
            page.open("about:blank")


def test_samples_appear_in_a_run_that_had_none(page: Chromium, tmp_path: Path) -> None:
    """The page has shown those of another run before; the first ones are of an evaluation, then of the training."""
    first, second = viewed_run(tmp_path / "first"), MadeRun(tmp_path / "second")
    second.start(1, ago=60)
    with served(first, second) as server:
        try:
            page.open(f"{server.url}#samples")
            page.until(f"{STEP} === 'step 20'")
            choose = "(choice => { choice.value = 1; choice.dispatchEvent(new Event('change')); })"
            page.evaluate(f"{choose}(document.querySelector('[aria-label=Run]'))")
            page.until("document.querySelector('#view .empty')")
            add_lines(second.path / "samples.jsonl", [sample(0, "held", 0, 0.5, kind="evaluation", response="now")])
            second.evaluation(0, ago=1, score=0.5, score_ci95=0.05)
            page.until(f"{RESPONSES}[0] === 'now'")
            add_lines(second.path / "samples.jsonl", step_samples(1))
            second.step(1, ago=0, objective__score=0.5)
            page.until("document.querySelector('[aria-label=Kind] button')")
            page.evaluate("document.querySelector('[aria-label=Kind] button').click()")
            page.until(f"{STEP} === 'step 1'")
        finally:
            page.open("about:blank")


def hover(page: Chromium) -> None:
    """The score of step 10 is 0.1, and all charts show that step."""
    box = page.evaluate("document.querySelector('.chart svg').getBoundingClientRect().toJSON()")
    page.move(box["x"] + 46 + (box["width"] - 54) * 9 / 19, box["y"] + box["height"] / 2)
    page.until("document.querySelector('.chart .values').textContent === '0.1'")
    assert page.evaluate("document.querySelectorAll('.chart .sub')[0].textContent").endswith("step 10")
    page.move(5, 5)
    page.until("document.querySelector('.chart .values').textContent === '0.2'")


def search_twice(page: Chromium, metric: str) -> None:
    """Two searches at once ask for the same point, and the curve has it once."""
    page.press("1")
    page.until("document.querySelector('.chart')")
    search = "document.querySelector('[type=search]')"
    page.evaluate(f"{search}.value = '{metric}'; for (const _ of '12') {search}.dispatchEvent(new Event('input'))")
    requests = (
        f"performance.getEntriesByType('resource').filter(({{name}}) => name.endsWith(encodeURIComponent('{metric}')))"
    )
    page.until(f"{requests}.length === 2")
    assert page.until("document.querySelectorAll('.chart circle[r=\"2.4\"]').length") == 1


def look_at_samples(page: Chromium, last: int) -> None:
    """Texts of models are not interpreted, and keys navigate to prompts and steps."""
    assert page.until(f"{RESPONSES}.length && {RESPONSES}") == [SCRIPT, "aU+202EbU+0007c"]
    page.press("j")
    page.until(f"{CHOSEN}.startsWith('say p2')")
    page.until(f"{RESPONSES}[0] === 'wörd {last}'")
    page.press("ArrowLeft")
    page.until(f"{RESPONSES}[0] === 'wörd {last - 1}'")
    look_at_tokens(page)
    page.press("ArrowRight")
    page.until("document.querySelectorAll('.list li').length === 3")
    page.press("j")
    page.until(f"{CHOSEN}.startsWith('say talk')")
    look_at_a_conversation(page)
    page.press("/")
    for letter in "DER":  # in no text
        page.press(letter)
    page.until("document.querySelector('.empty')")
    page.evaluate("Object.assign(document.activeElement, {value: 'onerror'}).dispatchEvent(new Event('input'))")
    page.until("document.querySelector('#view mark')")


def look_at_tokens(page: Chromium) -> None:
    """The actor's log-probability of the second token is half a nat above the engine's, and it is masked.

    The fourth was given and has no values.
    """
    choice = "document.querySelector('[aria-label=\"Colour of tokens\"]')"
    options = page.evaluate(f"[...{choice}.options].map((option) => option.value).join()")
    assert options == ",rollout,old,gap,ratio,update,clipped,mask"
    page.evaluate(f"{choice}.value = 'gap'; {choice}.dispatchEvent(new Event('change'))")
    page.until("document.querySelector('.tokens .masked')")
    assert "not learned from" in page.evaluate("document.querySelector('.keys').textContent")
    page.evaluate("document.querySelector('.tokens').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    tip = page.evaluate("document.querySelector('.keys .tip').textContent")
    assert SCRIPT in tip
    assert "engine0.5" in tip
    assert "ratio, actor to engine1.649" in tip
    assert "ratio in the update1.5clipped in the update1" in tip
    assert page.evaluate("document.querySelectorAll('.tokens .token')[2].textContent") == "U+200F"
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert "log-probability, enginenone" in page.evaluate("document.querySelector('.keys .tip').textContent"), "given"
    assert page.evaluate("document.querySelectorAll('.tokens .masked').length") == 2
    page.evaluate("document.activeElement.blur()")


def look_at_a_conversation(page: Chromium) -> None:
    """Turns of the model and of the environment with their rewards, in two branches, and how conversations ended."""
    by = "[...document.querySelectorAll('.turn .by')].map((turn) => turn.textContent)"
    assert page.until(f"{by}.length && {by}") == [
        "model3 tokensreward 0.25",
        "environment2 tokensnot learned from",
        "model2 tokensreward 0.5",
        "model0 tokensreward 0",
    ]
    assert page.evaluate("document.querySelectorAll('.response').length") == 2, "branches are one conversation"
    assert page.evaluate("document.querySelector('.response details').textContent") == "prompt, 3 tokensrewritten"
    facts = page.evaluate("[...document.querySelectorAll('.response > .facts')].map((facts) => facts.textContent)")
    assert "3 turns8 tokensended by a limitasked 2" in facts[0]
    assert "failed" in facts[1]
    assert SCRIPT in page.evaluate("document.querySelector('.response > .bad').textContent")
    for key, at in (("n", 0), ("n", 1), ("p", 0)):
        page.press(key)
        assert page.evaluate("[...document.querySelectorAll('.turn')].indexOf(document.activeElement)") == at
    given = "getComputedStyle(document.querySelector('.turn.environment')).backgroundColor"
    assert page.evaluate("getComputedStyle(document.activeElement).backgroundColor") != page.evaluate(given)
    choice = "document.querySelector('[aria-label=\"Colour of tokens\"]')"
    page.evaluate(f"{choice}.value = 'rollout'; {choice}.dispatchEvent(new Event('change'))")
    page.until("document.querySelector('.tokens .turn')")
    tokens = "[...document.querySelectorAll('.tokens .turn')].map((turn) => turn.querySelectorAll('.token').length)"
    assert page.evaluate(tokens) == [3, 2]
    page.evaluate("document.activeElement.blur()")


def test_an_exported_page_works_without_a_server(page: Chromium, tmp_path: Path) -> None:
    first, second = (
        RunView(viewed_run(tmp_path / name, steps).path, name) for name, steps in (("one", 20), ("two", 7))
    )
    export([first, second], tmp_path / "page.html")
    page.open((tmp_path / "page.html").as_uri())
    page.until("document.querySelectorAll('.chart:first-child svg path.line').length >= 2")
    page.evaluate("document.querySelector('.swatch').click()")
    page.until("document.querySelectorAll('.chart:first-child svg')[0].querySelectorAll('path.line').length === 1")
    for width, scheme in ((1280, "light"), (360, "dark")):
        page.size(width, 800)
        page.prefer(scheme)
        for number, shown in enumerate(
            ("svg path.line", ".response", ".response mark", "canvas", ".scroll", "table td"), start=1
        ):
            page.press(str(number))
            page.until(f"document.querySelector('#view {shown}')")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (number, width)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
    assert SCRIPT in page.evaluate("document.getElementById('view').textContent")


def test_a_function_called_accuracy_is_drawn_once(page: Chromium, tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    for step in (0, 5):
        run.evaluation(step, ago=5, accuracy=0.5, accuracy_ci95=0.1)
    export([RunView(run.path, "run")], tmp_path / "page.html")
    page.open((tmp_path / "page.html").as_uri())
    titles = "[...document.querySelectorAll('.chart h3')].map((title) => title.textContent)"
    assert page.until(f"{titles}.length && {titles}") == ["Held-out: accuracy"]


def test_an_export_tells_what_it_lacks(page: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.dashboard.view.page_export._SAMPLES_BYTES", 2 * 1100)
    export([RunView(viewed_run(tmp_path / "run").path, "run")], tmp_path / "page.html")
    page.open((tmp_path / "page.html").as_uri() + "#samples")
    page.until("document.querySelector('#view .toolbar')?.textContent.includes('2 of 80 samples')")
    search = "document.querySelector('[type=search]')"
    page.evaluate(f"{search}.value = 'wörd'; {search}.dispatchEvent(new Event('input'))")
    page.until("document.querySelector('.empty')?.textContent.includes('2 of 80 samples')")
