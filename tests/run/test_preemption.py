"""When a run leaves: signals, the grace after them, and the end of its time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from megarl.cluster.calls import WorkerError
from megarl.cluster.driver_environment import interrupts_raise
from megarl.errors import PreemptedError
from megarl.run.preemption import Preemption, end_of_time
from megarl.run.timers import process_age
from tests.config.debug import debug
from tests.loop.answers import run
from tests.run.staging import Clock

SECOND_S = 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Fails a test that leaves other handlers of signals."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    with interrupts_raise():
        yield
    assert [signal.getsignal(number) for number in numbers] == before


async def saved() -> None:
    """The checkpoint is committed."""


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_leaves_after_the_step_in_which_it_gets_a_signal(number: signal.Signals) -> None:
    with Preemption(SECOND_S, None) as preemption:
        assert not preemption.leaves()
        run(preemption.saved(1, saved))
        send(number)
        assert preemption.leaves()
        with pytest.raises(PreemptedError, match=f"preempted after step 2: it got {number.name}") as raised:
            run(preemption.saved(2, saved))
    assert raised.value.exit_code == 75
    send(signal.SIGTERM)  # it cleans up


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
def test_sigterm_after_a_signal_ends_a_run_at_once(first: signal.Signals) -> None:
    with Preemption(SECOND_S, None):
        send(first)
        send(signal.SIGUSR1)
        with pytest.raises(SystemExit, match="143"):
            send(signal.SIGTERM)


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        (signal.SIGTERM, None, SystemExit),
        (signal.SIGUSR1, signal.SIGTERM, SystemExit),
        (signal.SIGUSR1, None, WorkerError),
    ],
)
def test_a_process_that_the_signal_of_a_job_ended_is_an_interrupt(
    before: int, after: int | None, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm signals the ranks, too, some before the driver; without SIGTERM a lost process is an error."""
    monkeypatch.setattr("megarl.run.preemption._LATE_S", 0.1 if after is None else SECOND_S)

    def lose_a_process() -> None:
        with Preemption(SECOND_S, None, in_job=True):
            send(before)
            if after is not None:
                threading.Timer(0.1, send, [after]).start()
            raise WorkerError("train rank 1 died")

    with pytest.raises(error):
        lose_a_process()


def test_the_end_of_the_grace_ends_a_run() -> None:
    with Preemption(0.05, None):
        send(signal.SIGTERM)
        with pytest.raises(SystemExit):
            time.sleep(SECOND_S)


def test_without_a_grace_sigterm_ends_a_run_at_once() -> None:
    with Preemption(0.0, None) as preemption:
        send(signal.SIGUSR1)
        assert preemption.leaves()
    with Preemption(0.0, None), pytest.raises(SystemExit):
        send(signal.SIGTERM)


def test_the_grace_ends_before_the_time(clock: Clock) -> None:
    for number, end, left in [
        (signal.SIGTERM, None, 100),
        (signal.SIGTERM, 1090, 60),
        (signal.SIGTERM, 1500, 100),
        (signal.SIGUSR1, None, 0),
        (signal.SIGUSR1, 1500, 470),
        (signal.SIGUSR1, 1010, 1),
    ]:
        with Preemption(100.0, end, clock):
            send(number)
            assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(left, abs=0.5)


def test_a_run_leaves_while_another_step_its_checkpoint_and_the_end_fit(clock: Clock) -> None:
    steps, saves = (20, 40, 10, 10, 10), {2: 15}
    left: list[float] = []
    # After step 3 at 1085 there are 40 s for a step, 15 for its checkpoint and 30 for the end; after 4 at 1095 not.
    with Preemption(SECOND_S, 1175.0, clock) as preemption:
        for step, seconds in enumerate(steps, start=1):
            clock.now += seconds
            if preemption.leaves(saves[2] if step > 2 else 0.0):
                left.append(clock.now)
                with pytest.raises(PreemptedError, match=f"step {step}: its time is over"):
                    run(preemption.saved(step, saved))
                break
            if step in saves:
                clock.now += saves[step]
                run(preemption.saved(step, saved))
    assert left == [1095.0]


def test_the_first_checkpoint_is_taken_to_be_as_long_as_the_longest_step(clock: Clock) -> None:
    for end, leaves in [(1089.0, True), (1090.0, False)]:
        clock.now = 1000.0
        with Preemption(SECOND_S, end, clock) as preemption:
            clock.now += 20
            assert preemption.leaves() == leaves


@pytest.mark.parametrize(("written", "seconds"), [("4:00:00", 14400), ("'0:30:00'", 1800), ("90", 90), ("1:30", 90)])
def test_a_time_limit_is_of_the_process(written: str, seconds: float) -> None:
    run = debug(f"run.time_limit={written}").run
    assert run.time_limit == seconds
    end = end_of_time(run, {})
    assert end == pytest.approx(time.time() - process_age() + seconds, abs=1)


def test_the_end_of_the_slurm_job_holds_as_well() -> None:
    run = debug().run
    assert end_of_time(run, {}) is None
    assert end_of_time(run, {"SLURM_JOB_END_TIME": "0"}) is None
    assert end_of_time(run, {"SLURM_JOB_END_TIME": "1700000000"}) == 1_700_000_000
    limited = debug("run.time_limit=1000000").run
    assert end_of_time(limited, {"SLURM_JOB_END_TIME": "1700000000"}) == 1_700_000_000
    assert end_of_time(limited, {"SLURM_JOB_END_TIME": "9700000000"}) == pytest.approx(end_of_time(limited, {}))
