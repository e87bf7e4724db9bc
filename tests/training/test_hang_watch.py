"""A step that does not end is named once, with the steps it may be and the place the run waits in."""

import re
import threading

from jaxblock.training.watch.hang import HangWatch


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(seconds: float = 10.0):
    clock, said = Clock(), []
    return HangWatch(seconds, said.append, clock), clock, said


def test_a_step_that_hangs_is_named_once_with_the_place():
    watch, clock, said = watched()
    watch.started(1)
    clock.now = 9.9
    watch.look()
    assert said == []  # the control: it is not late yet
    clock.now = 10.0
    watch.look()
    watch.look()
    (sentence,) = said
    assert sentence.startswith("watch: step 1 has not ended after 10 s; the run waits in ")
    assert re.search(r"hang.py:\d+, _place$", sentence)  # this very thread looked


def test_steps_started_ahead_are_named_with_the_first_that_may_hang():
    watch, clock, said = watched()
    watch.started(1)
    watch.ended(1)
    for step in (2, 3, 4):
        watch.started(step)
    clock.now = 11.0
    watch.look()
    assert said[0].startswith("watch: step 4 (or one of those since 2) has not ended after 11 s")


def test_what_is_no_step_is_not_named():
    watch, clock, said = watched()
    watch.started(1)
    watch.ended(1)  # an evaluation may take as long as it likes
    clock.now = 100.0
    watch.look()
    assert said == []
    watch.started(2)
    clock.now = 109.0
    watch.look()
    assert said == []
    clock.now = 110.0
    watch.look()
    assert len(said) == 1


def test_the_thread_looks_while_the_run_waits_and_ends_with_it():
    heard = threading.Event()
    before = threading.active_count()
    with HangWatch(0.02, lambda sentence: heard.set()) as watch:
        watch.started(1)
        assert heard.wait(30)
    assert threading.active_count() == before
    with HangWatch(0.0, lambda sentence: heard.set()):
        assert threading.active_count() == before  # the control: off, there is no thread
