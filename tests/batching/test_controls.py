"""Requests wait for the end of a batch; a larger staleness opens the window at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_run import make_plan

from async_grpo.batching.admission import AdmissionWindow
from async_grpo.batching.records import Controls
from async_grpo.config.train_config import TrainConfig
from async_grpo.types import Control
from async_grpo.util.errors import ConfigError

CONFIG = TrainConfig(
    model_name_or_path="m", data_path="d", ratio_mode="behaviour", checkpoint_every_batches=0
)


def control(name, action="set", **settings):
    return Control(name, action, "somebody", "2026-11-23T12:00:00+00:00", settings)


def make(**options):
    return Controls(make_plan(CONFIG, **options))


def test_what_was_asked_holds_from_the_next_batch_on_in_the_order_of_asking():
    controls = make()
    for number, rate in enumerate((1e-5, 2e-5)):
        controls.ask(control(str(number), learning_rate=rate))
    assert (
        controls.settings == {}
        and controls.options["learning_rate"] == CONFIG.optimizer.learning_rate
    )
    assert [each.id for each in controls.waiting] == ["0", "1"]
    assert [each.id for each in controls.take()] == ["0", "1"]
    assert controls.settings == {"learning_rate": 2e-5} and controls.waiting == ()
    assert controls.take() == () and controls.settings == {"learning_rate": 2e-5}


def test_the_same_request_is_done_once():
    controls = make(pending=[control("a", learning_rate=1e-5)])
    controls.ask(control("a", learning_rate=1e-5))
    assert len(controls.take()) == 1
    controls.ask(control("a", learning_rate=1e-5))
    assert controls.take() == () and len(controls.asked) == 1


def test_a_worker_is_drained_without_waiting_for_a_batch():
    controls = make()
    controls.ask(Control("a", "drain", "somebody", "", worker="w"))
    assert controls.waiting == () and [each.worker for each in controls.asked] == ["w"]


@pytest.mark.parametrize(
    "asked, sentence",
    [
        (control("a", learning_rate=1.0), "--learning-rate must be at most 0.01"),
        (control("a", "evaluate"), "needs held-out questions"),
        (control("a", "stop"), "needs a checkpoint to stop at"),
    ],
)
def test_what_cannot_be_done_is_refused_and_does_not_wait(asked, sentence):
    controls = make()
    with pytest.raises(ConfigError, match=sentence):
        controls.ask(asked)
    assert controls.waiting == () == controls.asked


def test_a_staleness_rises_now_and_falls_with_the_batch():
    controls = make(settings={"max_staleness": 2})
    controls.ask(control("a", max_staleness=4))
    assert controls.staleness == (2, 4)
    controls.take()
    controls.ask(control("b", max_staleness=1))
    assert controls.staleness == (4, 1)
    controls.take()
    assert controls.staleness == (1, 1)


@given(changes=st.lists(st.integers(0, 4), min_size=1, max_size=12), size=st.integers(1, 3))
def test_a_window_admits_each_slot_once_and_never_ahead_of_its_staleness(changes, size):
    """One change a batch: each batch started when so many were published as its staleness says."""
    window = AdmissionWindow(
        size, questions_per_step=size, max_staleness=changes[0], num_batches=len(changes)
    )
    started = []
    for published, staleness in enumerate(changes):
        window.max_staleness = staleness
        if published:
            window.batch_published(published)
        for ordinal in window.start():
            batch = ordinal // size
            assert published <= batch <= published + staleness
            assert window.staleness_of(batch) == staleness
            assert window.oldest_weights(ordinal).batches >= batch - staleness
            started.append(ordinal)
    assert started == list(range(len(changes) * size))


def test_samples_that_have_started_keep_the_lag_that_they_were_allowed():
    window = AdmissionWindow(2, questions_per_step=2, max_staleness=2, num_batches=9)
    assert window.start() == range(6)
    window.max_staleness = 0
    window.batch_published(1)
    assert window.start() == range(6, 6)
    assert [window.staleness_of(batch) for batch in (1, 2, 3)] == [2, 2, 0]
    window.batch_published(2)
    window.batch_published(3)
    assert window.start() == range(6, 8)
    assert window.oldest_weights(6).batches == 3
