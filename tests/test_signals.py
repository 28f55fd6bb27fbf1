"""signals.py: an exception that a signal raised where nobody could catch it is raised again."""

import gc
import signal

import pytest

from rl_jax.signals import Preempted, on_sigterm, stop_at_once


def test_an_exception_lost_in_a_callback_of_the_collector_comes_again():
    def callback(phase, info):
        if phase == "start":
            signal.raise_signal(signal.SIGTERM)

    with on_sigterm(stop_at_once) as sigterm:
        sigterm.check()
        gc.callbacks.append(callback)
        try:
            gc.collect()  # printed as "Exception ignored in", and dropped
        finally:
            gc.callbacks.remove(callback)
        with pytest.raises(Preempted, match="stopped by signal 15 with nothing to save"):
            sigterm.check()


def test_the_innermost_handler_decides_and_the_old_one_comes_back():
    told = []
    with on_sigterm(stop_at_once) as outer:
        with on_sigterm(told.append):
            signal.raise_signal(signal.SIGTERM)
        assert told == [signal.SIGTERM]
        outer.check()
        with pytest.raises(Preempted):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
