"""signals.py: an exception that a signal raised where nobody could catch it is raised again."""

import gc
import signal

import pytest

from rl_jax.signals import Preempted, interrupt, on_signal, stop_at_once


def raise_in_collector(signum):
    def callback(phase, info):
        if phase == "start":
            signal.raise_signal(signum)

    gc.callbacks.append(callback)
    try:
        gc.collect()  # printed as "Exception ignored in", and dropped
    finally:
        gc.callbacks.remove(callback)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signum, handle, error",
    [(signal.SIGTERM, stop_at_once, Preempted), (signal.SIGINT, interrupt, KeyboardInterrupt)],
)
def test_an_exception_lost_in_a_callback_of_the_collector_comes_again(signum, handle, error):
    with on_signal(signum, handle) as kept:
        kept.check()
        raise_in_collector(signum)
        with pytest.raises(error):
            kept.check()


def test_the_innermost_handler_decides_and_the_old_one_comes_back():
    told = []
    with on_signal(signal.SIGTERM, stop_at_once) as outer:
        with on_signal(signal.SIGTERM, told.append):
            signal.raise_signal(signal.SIGTERM)
        assert told == [signal.SIGTERM]
        outer.check()
        with pytest.raises(Preempted):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
