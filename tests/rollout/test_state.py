"""The allowed orders of sleep, wake and sync, against every order of a few actions."""

from __future__ import annotations

import itertools

import pytest

from megarl.rollout.engine_state import EngineState

ACTIONS = ("answer", "sleep", "wake_weights", "sync", "wake_cache")
ORDER = ("wake_weights", "sync", "wake_cache", "answer", "sleep")


def take(state: EngineState, action: str) -> None:
    if action == "answer":
        state.usable_version()
    elif action == "sync":
        state.begin_sync()
        state.commit(3)
    else:
        getattr(state, action)()


def allowed(actions: tuple[str, ...]) -> bool:
    """A naive check: the engine's place in the cycle, and whether it has been synced since it slept."""
    place, synced = 0, False
    for action in actions:
        if action == "sync" and place == 1:
            synced = True
        elif action == "answer" and place == 2:
            pass
        elif (action, place) in (("wake_weights", 0), ("sleep", 2)) or (
            action == "wake_cache" and place == 1 and synced
        ):
            place, synced = (place + 1) % 3, synced and action != "sleep"
        else:
            return False
    return True


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_a_sleeping_engine_allows_only_one_order_of_actions(length: int) -> None:
    found = set()
    for actions in itertools.product(ACTIONS, repeat=length):
        state = EngineState(0, sleeps=True, drops=True, version=None)
        try:
            for action in actions:
                take(state, action)
        except RuntimeError:
            continue
        found.add(actions)
    assert found == {actions for actions in itertools.product(ACTIONS, repeat=length) if allowed(actions)}
    assert (ORDER + ORDER)[:length] in found


def after(*actions: str, **options: object) -> EngineState:
    state = EngineState(3, **{"sleeps": True, "drops": True, "version": None, **options})
    for action in actions:
        take(state, action)
    return state


def test_an_aborted_sync_requires_a_complete_one() -> None:
    state = after("wake_weights", "sync")
    state.begin_sync()
    state.mix()
    with pytest.raises(RuntimeError, match="a weight sync failed half-way"):
        state.wake_cache()
    take(state, "sync")
    state.wake_cache()
    assert state.usable_version() == 3


@pytest.mark.parametrize("overlaps", [False, True])
def test_sleep_is_refused_with_responses_in_progress(overlaps: bool) -> None:
    state = after(*ORDER[:3], overlaps=overlaps)
    with pytest.raises(RuntimeError, match="engine 3 cannot sleep with 2 responses in progress: wait for them first"):
        state.sleep(in_progress=2)
    assert state.usable_version() == 3
    state.sleep(in_progress=0)


def test_only_an_in_flight_engine_syncs_with_responses_in_progress() -> None:
    drains, overlaps = (after("sync", sleeps=False, overlaps=overlaps) for overlaps in (False, True))
    with pytest.raises(RuntimeError, match=r"engine 3 cannot sync with 1 responses in progress: .* inflight syncs"):
        drains.begin_sync(in_progress=1)
    assert drains.usable_version() == 3
    for state, in_progress in ((drains, 0), (overlaps, 1)):
        state.begin_sync(in_progress)
        state.commit(4)
        assert state.usable_version() == 4


def test_weights_from_files_survive_a_sleep() -> None:
    assert (
        after("wake_weights", "wake_cache", "sleep", "wake_weights", "wake_cache", drops=False, version=0).version == 0
    )
