"""The forward passes over a step's rollouts: log-probabilities of actor and reference, values of the critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.cluster.calls import ChunkCall
from megarl.config import RolloutTrainingConfig
from megarl.config.schema import Algo
from megarl.data.schedule import inference_schedule
from megarl.groups.rollouts import Rollouts
from megarl.groups.trainers import RemoteRole
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import ForwardRequest
from megarl.types import Ragged, RoleName, SampleInfo

Forward = ChunkCall[None, Ragged]
"""A call of a forward pass; the results are columns."""

Forwards = Mapping[str, Forward]
"""Calls over some rollouts: `logprobs`, `ref` and `values`, as far as there are any."""

ROLES: Mapping[str, RoleName] = {"logprobs": "actor", "ref": "reference", "values": "critic"}
"""The role of each of these passes."""


class ForwardPasses:
    """Starts passes over the parts of a step that have arrived, and the others over the whole step.

    The former are those of roles that have the weights of the step's training when the step is
    sampled: all of them at `rollout.max_staleness` 0, and above it the reference, unless it moves
    or its pass would delay the actor's sync.

    Args:
        teachers: name of the teacher of each prompt by its id; None where there are not several.
    """

    def __init__(
        self,
        config: RolloutTrainingConfig,
        algo: Algo,
        roles: Mapping[RoleName, RemoteRole],
        teachers: Mapping[str, str] | None = None,
    ) -> None:
        self._teachers = teachers or {}
        self._config = config
        self._parts = config.rollout.inference_parts if algo.filter is None else 1
        self._roles = {name: roles[role] for name, role in ROLES.items() if role in roles}
        self._names = list(self._roles)
        if not algo.has_logprob_pass:
            self._names.remove("logprobs")
        self._early = self._names
        if config.rollout.max_staleness:
            is_apart = "ref" in self._roles and self._roles["ref"].group is not self._roles["logprobs"].group
            self._early = ["ref"] if is_apart and algo.kl.reference_sync is None else []

    def begin(self, part: Rollouts) -> Forwards:
        """Starts the passes over a part of a step that need not wait for its training."""
        return {name: self._call(name, part) for name in self._early}

    def complete(self, rollouts: Rollouts, begun: Sequence[Forwards]) -> Mapping[str, Sequence[Forward]]:
        """Starts the passes over a step that are not among those begun on its parts; returns all."""
        begun = begun or [self.begin(part) for part in rollouts.parts(self._parts)]
        calls: dict[str, Sequence[Forward]] = {}
        for name in self._names:
            if name in self._early:
                calls[name] = [part[name] for part in begun]
            else:
                calls[name] = [self._call(name, rollouts)]
        return calls

    def actor_logprobs(self, rollouts: Rollouts) -> Forward:
        """Starts a pass of the actor over a step."""
        return self._call("logprobs", rollouts)

    def with_teachers(self, name: str, samples: Sequence[SampleInfo]) -> Sequence[SampleInfo]:
        """Returns the samples as a pass reads them: that of the reference with their teachers."""
        if name != "ref" or not self._teachers:
            return samples
        return [replace(sample, teacher=self._teachers[sample.prompt_id]) for sample in samples]

    def _call(self, name: str, rollouts: Rollouts) -> Forward:
        role = self._roles[name]
        budget = self._config.role(role.name).tokens_per_micro_batch
        request = ForwardRequest(
            schedule=inference_schedule(self.with_teachers(name, rollouts.samples), role.layout, budget),
            chunks=rollouts.chunks,
            temperature=self._config.rollout.temperature,
        )
        method = MegatronWorker.values if role.name == "critic" else MegatronWorker.logprobs
        return role.dispatch_by_chunk(method, request)
