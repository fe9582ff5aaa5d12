"""Who asked for what, and from which batch on it holds: written once each, and done again after."""

import json

from async_grpo.run.journals import CONTROL_FILE, ControlJournal, pending_after
from async_grpo.types import Control


def control(name, action="set", **settings):
    return Control(name, action, "me@here", "2026-11-23T12:00:00+00:00", settings)


SLOWER, FASTER = control("a", learning_rate=1e-7), control("b", learning_rate=1e-5)


def lines(folder):
    return [json.loads(line) for line in (folder / CONTROL_FILE).read_text().splitlines()]


def states(folder):
    return [(line["id"], line["state"], line.get("from_batch")) for line in lines(folder)]


def test_a_request_is_written_when_it_is_heard_of_and_when_it_holds(tmp_path):
    journal = ControlJournal(tmp_path)
    journal.received([SLOWER])
    journal.received([SLOWER, FASTER])
    assert journal.pending == (SLOWER, FASTER)
    journal.done([SLOWER, FASTER], from_batch=3)
    assert journal.pending == ()
    assert states(tmp_path) == [
        ("a", "asked", None),
        ("b", "asked", None),
        ("a", "done", 3),
        ("b", "done", 3),
    ]
    assert lines(tmp_path)[0]["by"] == "me@here"
    assert lines(tmp_path)[0]["settings"] == {"learning_rate": 1e-7}


def test_what_held_before_it_was_heard_of_is_written_whole(tmp_path):
    journal = ControlJournal(tmp_path)
    journal.done([SLOWER], from_batch=1)
    journal.received([SLOWER])
    assert states(tmp_path) == [("a", "asked", None), ("a", "done", 1)]


def test_a_drained_worker_waits_for_no_batch(tmp_path):
    journal = ControlJournal(tmp_path)
    journal.received([control("d", "drain")])
    assert states(tmp_path) == [("d", "done", None)] and journal.pending == ()


def test_a_resumed_run_does_again_what_its_checkpoint_does_not_hold(tmp_path):
    journal = ControlJournal(tmp_path)
    journal.received([SLOWER, FASTER, control("e", "evaluate"), control("s", "stop")])
    journal.done([SLOWER], from_batch=3)
    journal.done([control("e", "evaluate"), FASTER], from_batch=5)
    later = control("c", max_staleness=2), control("f", "evaluate")
    journal.received([*later, control("d", "drain")])
    with (tmp_path / CONTROL_FILE).open("ab") as file:
        file.write(b'{"state": "asked", "id": "cut')
    path = tmp_path / CONTROL_FILE
    assert pending_after(path, 2) == (SLOWER, FASTER, *later)
    assert pending_after(path, 3) == pending_after(path, 4) == (FASTER, *later)
    assert pending_after(path, 5) == later
    assert pending_after(tmp_path / "none", 0) == ()


def test_what_an_earlier_part_has_asked_is_not_written_again(tmp_path):
    journal = ControlJournal(tmp_path, [SLOWER])
    journal.received([SLOWER])
    assert not (tmp_path / CONTROL_FILE).exists() and journal.pending == (SLOWER,)
