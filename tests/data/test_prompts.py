"""Prompts from rows, random prompts, and sample requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.prompts import load_prompts, random_prompts, sample_requests
from megarl.types import Prompt


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", token_ids=(i,)) for i in range(count)]


def test_random_prompts_keep_within_bounds_and_reach_them() -> None:
    prompts = random_prompts(count=200, min_tokens=2, max_tokens=5, vocab_size=7, seed=1)
    assert {len(p.token_ids) for p in prompts} == {2, 3, 4, 5}
    assert {t for p in prompts for t in p.token_ids} == set(range(7))
    assert prompts[:10] == random_prompts(count=10, min_tokens=2, max_tokens=5, vocab_size=7, seed=1)
    assert prompts != random_prompts(count=200, min_tokens=2, max_tokens=5, vocab_size=7, seed=2)


def test_sample_seeds_belong_to_the_sample() -> None:
    prompts = prompts_of(4)
    requests = sample_requests(prompts, 3, seed=0, step=5)
    assert [r.sample_id for r in requests[:4]] == ["5/p0/0", "5/p0/1", "5/p0/2", "5/p1/0"]
    assert len({r.seed for r in requests}) == 12
    assert all(0 <= r.seed < 2**63 for r in requests)
    alone = sample_requests(prompts[2:3], 3, seed=0, step=5)
    assert alone == requests[6:9]
    assert {r.seed for r in sample_requests(prompts, 3, seed=0, step=6)}.isdisjoint(r.seed for r in requests)
    twice = sample_requests([prompts[0], prompts[0]], 2, seed=0, step=5)
    assert [r.sample_id for r in twice] == [f"5/p0/{i}" for i in range(4)]


def test_seeds_are_the_same_in_another_process() -> None:
    program = (
        "import json; from megarl.data.prompts import *;"
        "p = random_prompts(count=3, min_tokens=1, max_tokens=4, vocab_size=9, seed=0);"
        "print(json.dumps([[r.seed, *r.prompt.token_ids] for r in sample_requests(p, 2, seed=1, step=2)]))"
    )
    prompts = random_prompts(count=3, min_tokens=1, max_tokens=4, vocab_size=9, seed=0)
    here = [[r.seed, *r.prompt.token_ids] for r in sample_requests(prompts, 2, seed=1, step=2)]
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert json.loads(there) == here
