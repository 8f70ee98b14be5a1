"""The share of time that the training thread waits."""

import time

from burnish.loop.meter import IdleTime


def test_sleeping_thread_is_waiting_and_computing_thread_is_not():
    clock = IdleTime()
    time.sleep(0.2)
    waited, passed = clock.read()
    assert 0.15 < waited <= passed
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    waited, passed = clock.read()  # however long others held the processor in between
    assert waited < 0.1 < passed


def test_timer_overhead_is_below_a_thousandth_of_a_short_step():
    clock, began = IdleTime(), time.thread_time()
    for _ in range(100):
        clock.read()
    assert (time.thread_time() - began) / 100 < 0.001
