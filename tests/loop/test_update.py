"""Optimizer steps of actor and critic: which are taken, which are skipped, and the pretraining texts in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.algos.kl import KLController
from megarl.cluster.ray_worker import ChunkRefs
from megarl.config.schema import Algo, EarlyStop
from megarl.experience.records import StepContext
from megarl.loop import update
from megarl.loop.update import Updater, mean_kl
from megarl.megatron.worker import MegatronWorker
from megarl.megatron.worker_requests import UpdateRequest
from megarl.stages.ppo.trainer import PPOTrainer
from megarl.types import Layout, RankSchedule, RoleName, Schedule
from tests.config.debug import debug
from tests.loop.answers import Answered, answer, info, run

TOKENS = (10, 30)
"""Response tokens of the two optimizer steps of an epoch."""

EPOCHS = 3
BOTH: frozenset[RoleName] = frozenset({"actor", "critic"})

TEXTS = SimpleNamespace(next=lambda schedules: (schedules, SimpleNamespace(schedules=schedules)))
"""As many schedules of texts as of samples."""


class FakeRole:
    """Records its calls; each optimizer step reports the next of some KL divergences.

    Args:
        log: of all roles.
        kls: the actor's.
    """

    def __init__(self, name: str, log: list[tuple[str, Any]], kls: list[float]) -> None:
        self.name, self._log, self._kls = name, log, kls

    def dispatch(self, method: Any, request: UpdateRequest[Schedule]) -> Any:
        assert method is MegatronWorker.update
        self._log.append((self.name, [s.ranks[0].total_response_tokens for s in request.schedules]))
        if request.texts is not None:
            self._log.append(("texts", len(request.texts.schedules)))
        prefix = {"actor": "policy", "critic": "value"}[self.name]
        steps = [
            {f"{prefix}/ppo_kl": self._kls.pop(0), f"{prefix}/kl_coef": request.kl_coef} for _ in request.schedules
        ]
        return Answered(None, steps)

    def call(self, method: Any, *args: Any) -> Any:
        notes = {
            MegatronWorker.skip_steps: (f"{self.name} skips", *args),
            MegatronWorker.soft_update_reference: ("reference", "follows"),
        }
        self._log.append(notes[method])
        return Answered()


class FakeMeter:
    """Notes the passes."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, int, float]] = []

    def add_update(self, role: str, schedules: list[Schedule], seconds: float) -> None:
        self.passes.append((role, len(schedules), seconds))


def schedule(tokens: int) -> Schedule:
    rank = RankSchedule(
        packs=(), teachers=(), pack_tokens=1, total_rows=1, total_sequences=1, total_response_tokens=tokens
    )
    return Schedule(ranks=(rank,))


def updated(
    kls: list[float],
    *,
    step: int = 4,
    stop: EarlyStop | None = None,
    warmup: int = 0,
    every: int | None = None,
    texts: Any = None,
    trained_roles: frozenset[RoleName] = BOTH,
    meter: Any = None,
) -> tuple[list[dict[str, float]], list[tuple[str, Any]]]:
    """The metrics of the optimizer steps, and the calls."""
    log: list[tuple[str, Any]] = []
    sync = None if every is None else SimpleNamespace(every=every)
    kl = SimpleNamespace(reference_sync=sync)
    algo: Any = SimpleNamespace(early_stop=stop, kl=kl, mini_batches=len(TOKENS), ppo_epochs=EPOCHS)
    roles: Any = {"actor": FakeRole("actor", log, list(kls)), "critic": FakeRole("critic", log, [0.0] * 6)}
    updater = Updater(debug(), algo, roles, texts, meter or FakeMeter(), warmup_steps=warmup)
    samples = [info(f"{step}/p{row}/0", f"p{row}", row) for row in range(len(TOKENS))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "update_schedules", lambda *_, **__: tuple(map(schedule, TOKENS)) * EPOCHS)
        told = run(updater.update(ChunkRefs({}), samples, step, kl_coef=0.5, trained_roles=trained_roles))
    return told, log


def test_a_selection_is_all_that_is_trained_on() -> None:
    samples = [info(f"1/p{row}/0", f"p{row}", row, response_tokens=row + 1) for row in range(6)]
    algo = Algo.model_validate({"mini_batches": 2, "ppo_epochs": 3})
    roles: Any = {"actor": FakeRole("actor", [], [])}
    updater = Updater(debug(), algo, roles, None, FakeMeter())
    assert updater._steps == 6
    for selected, mini_batches in (([4, 1, 2], 2), ([3], 1)):
        (schedules,) = updater._passes("actor", [samples[index] for index in selected], 1)
        assert len(schedules) == 3 * mini_batches
        for epoch in range(3):
            own = schedules[epoch * mini_batches : (epoch + 1) * mini_batches]
            rows = [row.row for one in own for rank in one.ranks for pack in rank.packs for row in pack]
            assert sorted(rows) == sorted(selected)
            tokens = [one.ranks[0].total_response_tokens for one in own]
            assert sum(tokens) == sum(index + 1 for index in selected)


def test_actor_and_critic_take_all_steps_in_one_call_per_role() -> None:
    told, log = updated([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert log == [("actor", [10, 30] * 3), ("critic", [10, 30] * 3)]
    assert [step["policy/ppo_kl"] for step in told] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert all(step["value/kl_coef"] == 0.5 for step in told)


def test_epochs_stop_early_after_too_large_a_kl() -> None:
    """The means by tokens: (0 + 3 * 0.02) / 4 = 0.015 continues, 0.0201 * 3 / 4 = 0.015075 exceeds 1.5 * 0.01."""
    stop = EarlyStop(kl=0.01)
    told, log = updated([0.0, 0.02, 0.0, 0.0201, 9.0, 9.0], stop=stop)
    assert log == [
        ("actor", [10, 30]),
        ("critic", [10, 30]),
        ("actor", [10, 30]),
        ("critic", [10, 30]),
        ("actor skips", 2),
        ("critic skips", 2),
    ]
    assert len(told) == 4


def test_a_policy_with_small_kl_takes_all_epochs() -> None:
    told, log = updated([0.0] * 6, stop=EarlyStop(kl=0.01))
    assert len(told) == 6
    assert not [name for name, _ in log if name.endswith("skips")]


@pytest.mark.parametrize(
    ("step", "roles", "texts", "expected"),
    [(2, BOTH, None, False), (3, BOTH, None, True), (3, {"critic"}, None, False), (3, set(), object(), True)],
    ids=["in the warm-up", "after it", "without scores", "with texts"],
)
def test_actor_training_is_known_before_the_update(step: int, roles: Any, texts: Any, expected: bool) -> None:
    roles_of: Any = {"actor": FakeRole("actor", [], [])}
    updater = Updater(debug(), Algo(), roles_of, texts, FakeMeter(), warmup_steps=2)
    assert updater.trains_actor(step, roles) == expected


@pytest.mark.parametrize(("step", "names"), [(2, {"critic"}), (3, {"actor", "critic"})])
def test_a_critic_warms_up_alone(step: int, names: set[str]) -> None:
    told, log = updated([0.0] * 6, step=step, warmup=2, stop=EarlyStop(kl=0.01))
    assert {name for name, _ in log} == names
    assert len(told) == 6


@pytest.mark.parametrize(("step", "follows"), [(3, False), (4, True), (6, True)])
def test_the_reference_is_updated_every_n_steps(step: int, follows: bool) -> None:
    _, log = updated([0.0] * 6, step=step, every=2)
    assert (log[-1] == ("reference", "follows")) is follows


def test_pretraining_texts_go_to_the_actor_only() -> None:
    meter = FakeMeter()
    _, log = updated([0.0] * 6, texts=TEXTS, meter=meter)
    assert [entry for entry in log if entry[0] == "texts"] == [("texts", 6)]
    assert meter.passes == [("actor", 12, 2.0), ("critic", 6, 2.0)]
    assert log[0][0] == "actor"


@pytest.mark.parametrize("stop", [None, EarlyStop(kl=0.01)])
def test_a_role_without_training_tokens_skips_its_steps(stop: EarlyStop | None) -> None:
    told, log = updated([], stop=stop, trained_roles=frozenset(), every=2)
    assert told == []
    assert log == [("actor skips", 6), ("critic skips", 6), ("reference", "follows")]
    told, log = updated([], stop=stop, trained_roles=frozenset({"critic"}))
    assert {name for name, _ in log} == {"actor skips", "critic"}
    assert [sorted(step) for step in told] == [["value/kl_coef", "value/ppo_kl"]] * 6
    _, log = updated([], step=1, warmup=1, trained_roles=frozenset())
    assert log == [("critic skips", 6)], "during warmup the actor has no steps to skip"


def test_pretraining_texts_are_trained_on_without_scores() -> None:
    told, log = updated([0.0] * 6, texts=TEXTS, trained_roles=frozenset())
    assert {name for name, _ in log} == {"critic skips", "actor", "texts"}
    assert len(told) == 6


@pytest.mark.parametrize(("second", "mean"), [({"policy/ppo_kl": 0.0}, 0.1), ({}, 0.4)], ids=["with tokens", "none"])
def test_the_mean_is_over_the_tokens_of_steps_that_have_any(second: dict[str, float], mean: float) -> None:
    assert mean_kl([{"policy/ppo_kl": 0.4}, second], [schedule(10), schedule(30)]) == pytest.approx(mean)
    assert mean_kl([{}], [schedule(10)]) == 0.0


def test_the_kl_coefficient_adapts_once_to_the_actors_kl_in_a_steps_updates() -> None:
    config = SimpleNamespace(algo=SimpleNamespace(kl=SimpleNamespace(unit="sequence_sum")))
    trainer: Any = SimpleNamespace(_config=config, _kl=KLController(0.1, target=6.0, horizon=100.0))
    of_engines = {"rollout/kl": 0.0}
    PPOTrainer._adapt_kl_coef(trainer, [of_engines, {"objective/kl": 6.0}, {"objective/kl": 6.6}], 10)
    assert trainer._kl.coef == pytest.approx(0.1 * (1 + 0.05 * 10 / 100))  # their mean is 6.3, 5% above the target
    PPOTrainer._adapt_kl_coef(trainer, [of_engines, {}], 10)
    assert trainer._kl.coef == pytest.approx(0.1005)


@pytest.mark.parametrize(("algo", "turn_rewards"), [({"advantage": "gae"}, 3.0), ({"advantage": "grpo"}, None)])
def test_experience_is_built_with_the_version_before_the_step_and_the_weight_of_turns(
    algo: dict[str, Any], turn_rewards: float | None
) -> None:
    asked: list[Any] = []

    def dispatch(method: Any, request: Any) -> Answered:
        assert method is MegatronWorker.build_experience
        asked.append(request)
        return Answered(SimpleNamespace(metrics={}, value_norm={"mean": 2.0}), chunks={})

    config = SimpleNamespace(
        algo=Algo.model_validate(algo),
        rollout=SimpleNamespace(max_staleness=2),
        recorded_kept_max=None,
        role=lambda _: SimpleNamespace(tokens_per_micro_batch=8),
        has_scores=True,
    )
    trainer: Any = object.__new__(PPOTrainer)
    trainer._config, trainer._kl = config, SimpleNamespace(coef=0.5)
    trainer._value_norm, trainer._weights = {"mean": 1.0}, {"environment": 3.0}
    trainer._parts = SimpleNamespace(scorer=SimpleNamespace(token_scale=None))
    trainer.roles = {"actor": SimpleNamespace(layout=Layout(), dispatch_by_chunk=dispatch)}
    batch: Any = SimpleNamespace(
        samples=SimpleNamespace(groups=np.array([0])), metrics={}, scores_by_reward={"reward": [1.0]}
    )
    rollouts = SimpleNamespace(samples=[info("5/p/0", "p", 0)], chunks={})
    scored = SimpleNamespace(dense=None, seconds=1.5)

    async def build() -> Any:
        return await trainer._build_experience(SimpleNamespace(scoring=answer(scored), rollouts=rollouts), 5, {}, batch)

    _, metrics = run(build())
    assert asked[0].context == StepContext(
        kl_coef=0.5,
        version=4,
        groups=1,
        max_staleness=2,
        value_norm={"mean": 1.0},
        turn_rewards=turn_rewards,
    )
    assert (metrics["time/reward"], trainer._value_norm) == (1.5, {"mean": 2.0})
