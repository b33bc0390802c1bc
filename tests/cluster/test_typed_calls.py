"""Calls on workers are checked by the type checker: requests, arguments, methods and results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]

_BEGIN = """
from typing import assert_type

from megarl.cluster.calls import Call, ChunkCall, gather_by_chunk, rank0_result
from megarl.groups.engines import RolloutGroup
from megarl.cluster.ray_worker import ChunkRefs
from megarl.groups.trainers import RemoteRole
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest, UpdateRequest
from megarl.rollout.engine import RolloutEngine
from megarl.experience.records import ExperienceChunk
from megarl.types import Ragged, RolloutChunk, Schedule


async def calls(
    actor: RemoteRole,
    engines: RolloutGroup,
    schedule: Schedule,
    rollouts: ChunkRefs[RolloutChunk],
    experience: ChunkRefs[ExperienceChunk],
) -> None:
"""

RIGHT = (
    "update = UpdateRequest(schedules=[schedule], chunks=experience, kl_coef=0.1)",
    "assert_type(await rank0_result(actor.dispatch(MegatronWorker.update, update)), list[dict[str, float]])",
    "forward = ForwardRequest(schedule=schedule, chunks=rollouts)",
    "assert_type(actor.dispatch_by_chunk(MegatronWorker.values, forward), ChunkCall[None, Ragged])",
    "assert_type(await gather_by_chunk(actor.dispatch(MegatronWorker.logprobs, forward)), dict[int, Ragged])",
    "assert_type(actor.call(MegatronWorker.skip_steps, 3), Call[None])",
    "assert_type(await engines.call(RolloutEngine.logprobs, [[1, 2]]), list[Ragged])",
)
WRONG = {
    "a misspelt field": "UpdateRequest(schedules=[schedule], chunks=experience, kl_coeff=0.1)",
    "a missing field": "ForwardRequest(schedule=schedule)",
    "a wrong type of a field": "UpdateRequest(schedules=[schedule], chunks=experience, kl_coef='0.1')",
    "a wrong type of an argument": "actor.call(MegatronWorker.skip_steps, 'three')",
    "a missing argument": "actor.call(MegatronWorker.export, 'here')",
    "another method's request": "actor.dispatch(MegatronWorker.update, forward)",
    "a method that is not remote": "engines.call(RolloutEngine.shard_maps)",
    "a method that does not exist": "engines.call(RolloutEngine.generat)",
    "a method of other workers": "engines.call(MegatronWorker.close)",
    "a result taken for another": "text: str = await rank0_result(actor.dispatch(MegatronWorker.evaluate, forward))",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What the type checker says of each line, the right ones first."""
    directory = tmp_path_factory.mktemp("calls")
    lines = [*RIGHT, *WRONG.values()]
    (directory / "calls.py").write_text(_BEGIN + "".join(f"    {line}\n" for line in lines), encoding="utf-8")
    settings = {
        "include": ["calls.py"],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "basic",
        "pythonVersion": "3.12",
    }
    (directory / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "--project", str(directory)], cwd=directory, capture_output=True, text=True, timeout=280
    )
    first = _BEGIN.count("\n")
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {
        entry["range"]["start"]["line"] - first: entry["message"] for entry in found if entry["severity"] == "error"
    }


@pytest.mark.parametrize("line", range(len(RIGHT)))
def test_correct_calls_type_check_with_their_results(errors: dict[int, str], line: int) -> None:
    assert line not in errors, errors[line]
    assert min(errors) >= 0, "the imports are wrong"


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_in_a_call_is_a_type_error(errors: dict[int, str], mistake: str) -> None:
    assert len(RIGHT) + list(WRONG).index(mistake) in errors
