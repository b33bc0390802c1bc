"""A run that is trained on conversations: recorded responses, parts of which are taken for given tokens.

What the engine sampled after such a part it sampled after the same ids, so its log-probabilities stay exact.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from tests.e2e.conftest import DebugRun
from tests.e2e.runs import PARTS, lines, train

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]


def talk(source: Path, target: Path) -> dict[str, list[bool]]:
    """Writes the recorded samples of step 1 with gaps in those of three tokens or more; returns their masks by id."""
    target.mkdir()
    masks = {}
    for number, file in enumerate(sorted(source.glob("1%2F*"))):
        with np.load(file) as stored:
            columns = dict(stored)
        tokens = np.arange(len(columns["response_ids"]))
        mask = (tokens + number) % 4 != 1  # gaps of one token, at the beginning of some
        if len(tokens) < 3:
            mask[:] = True
        (_, _, version, engine), *others = columns["versions"]
        assert not others
        columns |= {
            "loss_mask": mask,
            "rollout_logprobs": columns["rollout_logprobs"][mask],
            "versions": np.array([[0, mask.sum(), version, engine]]),
        }
        np.savez(target / file.name, **columns)
        masks[unquote(file.stem)] = mask.tolist()
    return masks


def test_a_run_is_trained_on_conversations(debug_run: DebugRun, tmp_path: Path) -> None:
    masks = talk(debug_run.recorded, tmp_path / "talks")
    further = (f"rollout.replay={tmp_path / 'talks'}", "tracking.tokens=true", "tracking.samples=all", *PARTS)
    finished = train(tmp_path / "run", *further)
    assert finished.status == 0, finished.errors
    finished.assert_clean()
    first, whole = (lines(run / "metrics.jsonl")[0] for run in (tmp_path / "run", debug_run.directory))
    assert first["rollout/logprob_gap"] < 1e-4, "trainer and engine disagree about the tokens that it sampled"
    assert first["perf/tokens/logprobs"] == whole["perf/tokens/logprobs"], "all ids are computed"
    samples = [line for line in lines(tmp_path / "run" / "samples.jsonl") if line["kind"] == "train"]
    talks = [line for line in samples if line["step"] == 1]
    sampled = [sum(masks[line["sample_id"]]) for line in talks]
    assert [line["response_tokens"] for line in talks] == sampled
    assert first["response_length/mean"] == pytest.approx(np.mean(sampled))
    for line in talks:
        mask, tokens = masks[line["sample_id"]], line["tokens"]
        assert tokens.get("loss_mask", [1] * len(mask)) == [int(own) for own in mask]
        for name in ("rollout_logprobs", "old_logprobs", "advantages"):
            assert [value is not None for value in tokens[name]] == mask, name
    assert any("loss_mask" in line["tokens"] for line in talks)
    assert not any("loss_mask" in line["tokens"] for line in samples if line["step"] > 1), "generated in one turn"
