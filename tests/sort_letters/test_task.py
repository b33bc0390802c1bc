"""The task: its questions, its checker, its mistakes."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from examples.sort_letters.mistakes import DEMONSTRATED, REJECTED, Mistake, wrong_answer
from examples.sort_letters.task import MAX_PROMPT_TOKENS, Question, exact_match, mixed_match, questions
from megarl.rewards.functions import Completion

UP = Question(direction="up", letters="kdxbq")
DOWN = Question(direction="down", letters="kdxbq")


def answered(response: str, *, prompt: str = "up kdxbq:", finished: bool = True) -> float:
    return exact_match(
        Completion(
            prompt_id="0",
            prompt=prompt,
            response=response,
            prompt_ids=(),
            response_ids=(),
            finished=finished,
            fields={},
        )
    )


def test_prompts_of_a_curriculum_may_be_trivial_or_unsolvable() -> None:
    def score(kind: str, response: str) -> float:
        return mixed_match(
            Completion(
                prompt_id="0",
                prompt="up kdxbq:",
                response=response,
                prompt_ids=(),
                response_ids=(),
                finished=True,
                fields={"kind": kind},
            )
        )

    scores = [[score(kind, response) for response in ("bdkqx", "x")] for kind in ("solvable", "trivial", "unsolvable")]
    assert scores == [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


def test_answers_are_sorted_letters() -> None:
    assert (UP.prompt, UP.answer) == ("up kdxbq:", "bdkqx")
    assert (DOWN.prompt, DOWN.answer) == ("down kdxbq:", "xqkdb")


@pytest.mark.parametrize("question", [UP, DOWN])
def test_prompts_are_parsed(question: Question) -> None:
    assert Question.parse(question.prompt) == question


@pytest.mark.parametrize("prompt", ["", "up kdxbq", "left kdxbq:", "kdxbq:"])
def test_other_prompts_are_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="is not a prompt of the task"):
        Question.parse(prompt)


def test_only_the_correct_answer_scores() -> None:
    assert answered("bdkqx") == 1.0
    assert answered("xqkdb", prompt="down kdxbq:") == 1.0
    wrong = ("xqkdb", "kdxbq", "bdkq", "bdkqxx", "bdkqx ", "BDKQX", "")
    assert [answered(response) for response in wrong] == [0.0] * len(wrong)
    assert answered("bdkqx", finished=False) == 0.0


def test_the_split_is_by_set_of_letters() -> None:
    letters = ("kdxbq", "bdkqx", "xqkdb")
    sides = {Question(direction=way, letters=text).held_out for way in ("up", "down") for text in letters}
    assert len(sides) == 1


def test_a_fifth_is_held_out() -> None:
    asked = list(islice(questions(Random(0), held_out=False), 2000))
    assert not any(question.held_out for question in asked)
    random = Random(1)
    sets = {"".join(sorted(random.sample("abcdefghijklmnopqrstuvwxyz", 5))) for _ in range(5000)}
    share = sum(Question(direction="up", letters=letters).held_out for letters in sets) / len(sets)
    assert share == pytest.approx(0.2, abs=0.02)  # 3.5 standard deviations


def test_questions_are_valid_and_distinct() -> None:
    asked = list(islice(questions(Random(0), held_out=True), 500))
    assert all(question.held_out for question in asked)
    assert len(set(asked)) == len(asked)
    assert {len(question.letters) for question in asked} == {4, 5, 6, 7}
    assert all(len(set(question.letters)) == len(question.letters) for question in asked)
    assert {question.direction for question in asked} == {"up", "down"}
    assert max(len(question.prompt) for question in asked) == MAX_PROMPT_TOKENS


MISTAKES = {**DEMONSTRATED, **REJECTED}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrong_way", {"xqkdb"}),
        ("copied", {"kdxbq"}),
        ("swapped", {"dbkqx", "bkdqx", "bdqkx", "bdkxq"}),
        ("dropped", {"dkqx", "bkqx", "bdqx", "bdkx", "bdkq"}),
        ("doubled", {"bbdkqx", "bddkqx", "bdkkqx", "bdkqqx", "bdkqxx"}),
    ],
)
def test_each_mistake_does_what_its_name_says(name: str, expected: set[str]) -> None:
    (mistake,) = (made for made in MISTAKES if made.__name__ == name)
    assert {mistake(UP, Random(seed)) for seed in range(200)} == expected


def test_shuffled_and_substituted_mistakes() -> None:
    made = {mistake.__name__: {mistake(UP, Random(seed)) for seed in range(200)} for mistake in MISTAKES}
    assert all(sorted(text) == sorted("bdkqx") for text in made["shuffled"])
    assert len(made["shuffled"]) > 60  # of 120 orders
    for text in made["substituted"]:
        other = [at for at in range(5) if text[at] != "bdkqx"[at]]
        assert len(other) == 1
        assert text[other[0]] not in "bdkqx"


@pytest.mark.parametrize("shares", [DEMONSTRATED, REJECTED])
def test_wrong_answers_are_wrong_and_of_every_kind(shares: dict[Mistake, float]) -> None:
    question = Question(direction="up", letters="abcd")  # whose copy is right
    random = Random(0)
    made = {wrong_answer(question, random, shares) for _ in range(500)}
    assert question.answer not in made
    assert {"dcba", "bacd", "acd", "aabcd"} <= made


def test_shares_of_mistakes() -> None:
    assert sum(DEMONSTRATED.values()) == pytest.approx(0.65)
    assert sum(REJECTED.values()) == pytest.approx(1.0)
