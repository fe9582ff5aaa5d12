"""Messages arrive as they were sent, whatever pickler carries them."""

import pickle

import numpy as np
import ray.cloudpickle as cloudpickle

from async_grpo.types import (
    Episode,
    Minibatch,
    Question,
    Sample,
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
