"""The judge of a run: engines with a model that is asked for the score of each response."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megarl.cluster.calls import Call
from megarl.cluster.session import Session
from megarl.config import SamplingConfig
from megarl.config.schema import JudgeModel
from megarl.groups.engines import RolloutGroup, engine_options
from megarl.groups.rollouts import Rollouts
from megarl.groups.scorers import Question, RuleScorers, ScoredRows
from megarl.models import model_spec
from megarl.types import Prompt, SampleRequest
from megarl.weights.hf_files import read_config

_CHUNKS_PER_ENGINE = 8


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Engines with the judge's weights answer questions, which scoring processes ask and read."""

    settings: JudgeModel
    engines: RolloutGroup
    scorers: RuleScorers

    async def score(self, rollouts: Rollouts, prompts: Mapping[str, Prompt]) -> tuple[Call[ScoredRows], float]:
        """Asks for the score of every sample; returns the call that reads the answers, and the seconds before it.

        Args:
            prompts: by prompt id.
        """
        asking = self.scorers.questions(rollouts, prompts)
        questions: list[Question] = []
        for part in await asking:
            questions += part
        requests: list[SampleRequest] = []
        for number, question in enumerate(questions):
            if question.problem is not None:
                continue
            request = SampleRequest(
                sample_id=f"judge/{number}",
                prompt=Prompt(prompt_id=question.prompt_id, token_ids=question.token_ids),
                seed=zlib.crc32(np.array(question.token_ids, np.int32).tobytes()),
                temperature=self.settings.temperature,
            )
            requests.append(request)
        answers = self.engines.generate(requests, _CHUNKS_PER_ENGINE * len(self.engines.processes))
        seconds = max(await asking.longest(), await answers.longest())
        return self.scorers.read(questions, await answers.result()), seconds


def launch_judge(config: SamplingConfig, session: Session, scorers: RuleScorers | None) -> Judge | None:
    """Launches the engines of the judge, and returns at once; None without `reward.judge_model`."""
    settings = config.reward.judge_model
    if settings is None:
        return None
    assert scorers is not None
    options = engine_options(config.cluster, model_spec(read_config(settings.path)).dims.vocab, "files")
    engines = RolloutGroup(session, settings.rollout, settings.path, options, name="judge")
    return Judge(settings=settings, engines=engines, scorers=scorers)
