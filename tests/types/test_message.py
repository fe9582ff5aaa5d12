"""Messages arrive as they were sent, whatever pickler carries them."""

import io
import pickle
from dataclasses import replace

import numpy as np
import ray.cloudpickle as cloudpickle

from async_grpo.types import (
    Episode,
    Minibatch,
    Question,
    Sample,
    Ticket,
    Turn,
    Verdict,
    VersionSpan,
    WeightsVersion,
)

TOKENS = np.arange(4, dtype=np.int32)
SPAN = VersionSpan(WeightsVersion(1, 2), 0, 4)
TURN = Turn(TOKENS, np.zeros(4, np.float32), (SPAN,), "stop", "4")
SAMPLE = Sample(
    7,
    1,
    Question(TOKENS[:2], "2 + 2", "4", {"kind": "sum"}),
    Episode.of_turn(TOKENS[:2], TURN),
    Verdict("scored", 1.0, None, "adapter", "", 0.5),
    advantage=0.25,
    scores={"reference": np.full(4, -1.0, np.float32)},
    contributes=False,
)


def test_every_field_of_what_is_nested_arrives():
    for pickler in (pickle, cloudpickle):
        (found,) = pickler.loads(pickler.dumps(Minibatch(3, (SAMPLE,)), protocol=5)).samples
        assert repr(found) == repr(SAMPLE)


def test_what_is_shared_stays_shared_and_arrays_may_be_written():
    found = pickle.loads(pickle.dumps(Minibatch(3, (SAMPLE, SAMPLE))))
    one, other = found.samples
    assert one is other
    one.episode.rows[0].loss_mask[0] = False
    assert not found.samples[1].episode.rows[0].loss_mask[0]


class Reference:
    """As Ray's: it must pass through the pickler that Ray watches, or nothing keeps its object."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return Reference, (self.name,)


class Watching(pickle.Pickler):
    """Notes the references that it meets itself, not those in bytes that others have pickled."""

    def __init__(self, file):
        super().__init__(file, protocol=5)
        self.met = []

    def persistent_id(self, value):
        if isinstance(value, Reference):
            self.met.append(value.name)


def test_tickets_arrive_with_their_samples_and_ray_sees_their_references():
    tickets = [(Ticket((Reference(n),), f"teacher:{n}", 8 * n),) for n in range(2)]
    samples = (*(replace(SAMPLE, index=n, tickets=own) for n, own in enumerate(tickets)), SAMPLE)
    file = io.BytesIO()
    watching = Watching(file)
    watching.dump([Minibatch(3, samples), "and an end"])
    assert watching.met == [0, 1]
    found, _ = pickle.loads(file.getvalue())
    assert found.round_index == 3
    assert repr([replace(sample, tickets=()) for sample in found.samples]) == repr(
        [replace(sample, tickets=()) for sample in samples]
    )
    told = [
        [(ticket.reference[0].name, ticket.teacher, ticket.num_bytes) for ticket in sample.tickets]
        for sample in found.samples
    ]
    assert told == [[(0, "teacher:0", 0)], [(1, "teacher:1", 8)], []]
