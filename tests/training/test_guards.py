"""Guards: what is recorded, what stops a run, and what a second signal does."""

import math
import os
import signal
import subprocess
import sys

import pytest

from scrimp.errors import TrainingError
from scrimp.training.guards import NonFiniteGuard, OutlierWatch, StopSignals


def test_a_spike_is_an_outlier_and_noise_is_not() -> None:
    watch = OutlierWatch("loss")
    assert all(watch.check(3.0 + 0.01 * math.sin(step)) is None for step in range(60))
    sentence = watch.check(4.0)
    assert sentence is not None
    assert "loss 4 " in sentence


def test_a_lasting_change_of_level_becomes_the_new_normal() -> None:
    watch = OutlierWatch("loss")
    for step in range(64):
        watch.check(1.0 + 0.01 * (step % 2))
    reports = [watch.check(2.0) for _ in range(64)]
    assert reports[0] is not None
    assert reports[-1] is None


def test_the_first_steps_are_never_outliers() -> None:
    watch = OutlierWatch("loss")
    assert [watch.check(value) for value in (1.0, 100.0, 1e6)] == [None, None, None]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_steps_are_skipped_until_patience_ends(bad: float) -> None:
    guard = NonFiniteGuard(patience=3)
    for step, (loss, norm) in enumerate([(bad, 1.0), (1.0, bad)], start=1):
        assert guard.check(loss, norm)
        guard.stop_if_exhausted(step)
    assert guard.check(bad, bad)
    with pytest.raises(TrainingError, match="3 steps in a row up to step 3"):
        guard.stop_if_exhausted(3)


def test_a_finite_step_restores_patience() -> None:
    guard = NonFiniteGuard(patience=2)
    for step in range(10):
        assert guard.check(math.nan, 1.0)
        guard.stop_if_exhausted(2 * step)
        assert guard.check(1.0, 1.0) is None


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_the_first_signal_asks_and_handlers_are_restored(number: signal.Signals, code: int) -> None:
    told: list[str] = []
    at_first = signal.signal(number, signal.default_int_handler)  # nohup has some ignored, which stay so
    try:
        with StopSignals(told.append) as signals:
            assert signals.exit_code == 0
            os.kill(os.getpid(), number)
            assert signals.should_stop()
            assert signals.received == number
            assert signals.exit_code == code
            assert len(told) == 1
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, at_first)


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once() -> None:
    script = (
        "import os, signal, time\n"
        "from scrimp.training.guards import StopSignals\n"
        "with StopSignals(lambda text: None):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == 143
