"""What made a step impossible comes back from its file, and makes it impossible again."""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import make_learner, make_minibatches, trained_step
from oracle import make_config, make_row, sample_of_rows, sent

from async_grpo.model.collate import collate
from async_grpo.training.minibatch_codec import without_too_large
from async_grpo.training.minibatch_log import suspected_minibatches
from async_grpo.training.recorder import MAX_SUSPECTS, Recorder, StepWriter, Suspects
from async_grpo.training.step import NON_FINITE
from async_grpo.types import EndOfStep, Minibatch
from async_grpo.util.errors import DataError

TOKENS = st.lists(st.integers(0, 63), min_size=1, max_size=6)


@st.composite
def rows(draw):
    output = draw(TOKENS)
    behaviour = st.lists(st.floats(width=32), min_size=len(output), max_size=len(output))
    mask = st.lists(st.booleans(), min_size=len(output), max_size=len(output))
    row = make_row(draw(TOKENS), output, mask=draw(mask), behaviour=draw(behaviour))
    return replace(row, logprobs=draw(st.sampled_from([row.logprobs, None])))


@st.composite
def samples(draw):
    own = draw(st.lists(rows(), min_size=1, max_size=2))
    length = sum(len(row.token_ids) for row in own)
    advantages = st.floats() | st.floats(width=32).map(lambda x: np.full(length, x, np.float32))
    return replace(
        sample_of_rows(own, reference=[draw(st.floats(width=32))] * length),
        ordinal=draw(st.integers(0, 2**40)),
        index=draw(st.integers(0, 9)),
        attempt=draw(st.integers(0, 9)),
        advantage=draw(advantages),
    )


@st.composite
def minibatches(draw):
    members = draw(st.lists(samples(), min_size=1, max_size=3))
    if draw(st.booleans()):
        two = {m: np.ones((len(m.scores["reference"]), 2), np.float32) for m in members}
        members = [replace(m, scores=m.scores | {"teacher:math": two[m]}) for m in members]
    return Minibatch(draw(st.integers(0, 9)), tuple(members))


def facts(packed):
    """All that model and loss read, through text, where NaN equals itself."""
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    values |= values.pop("scores")
    return {
        name: (str(value.dtype), str(value.tolist())) if torch.is_tensor(value) else value
        for name, value in values.items()
    }


def ranks(rank=0):
    return SimpleNamespace(rank=rank, world_size=12, device=torch.device("cpu"))


def suspects_of(folder, rank=0):
    return Suspects(str(folder), ranks(rank), options=make_config().options())


def kept_in(folder):
    """The files, and what the last of them holds."""
    paths = sorted((folder / "non_finite").iterdir())
    return paths, suspected_minibatches(paths[-1])


@settings(max_examples=50, deadline=None)
@given(kept=st.lists(minibatches(), min_size=1, max_size=3), share=st.booleans())
def test_a_file_gives_back_what_the_loss_reads(kept, share, tmp_path_factory):
    folder = tmp_path_factory.mktemp("suspects")
    suspects_of(folder).write(trained_step(*kept, suspects=range(len(kept))))
    (path,), loaded = kept_in(folder)
    assert path.name == "step_1_rank_0.log"
    was, now = (
        [facts(collate(m.samples, aggregation="sample-mean", share_prompts=share)) for m in some]
        for some in (kept, loaded)
    )
    assert now == was
    keys = [[part.key for part in minibatch.parts()] for minibatch in kept]
    assert [[sample.key for sample in minibatch.samples] for minibatch in loaded] == keys


def end(batch, step_in_batch, minibatches):
    samples = [sample for minibatch in minibatches for sample in minibatch.samples]
    return EndOfStep(
        batch, step_in_batch, step_in_batch == 1, num_samples=3, num_tokens=9, sent=sent(samples)
    )


def test_a_kept_minibatch_makes_the_step_not_finite_again(tmp_path):
    learner = make_learner(tmp_path)
    for minibatch in make_minibatches():
        learner.accumulate(minibatch)
    first = learner.update(end(2, 1, make_minibatches()))
    assert (first.skipped, first.suspects) == (NON_FINITE, (2,))

    (path,), (kept,) = kept_in(tmp_path)
    assert path.name == "step_6_rank_3.log"
    assert [sample.key for sample in kept.samples] == [(2, 0, 0, 0)]
    again = make_learner(tmp_path / "again")
    again.accumulate(kept)
    result = again.step.finish(3)
    assert (result.skipped, result.suspects) == (NON_FINITE, (0,))
    assert result.metrics["kl_sum"] == first.metrics["kl_sum"] == np.inf


class Heard(StepWriter):
    """Keeps the steps that it is handed."""

    def __init__(self):
        self.steps = []

    def write(self, step):
        self.steps.append(step)


@pytest.mark.parametrize("name", ["teacher.hidden", "teacher.logits"])
def test_states_and_logits_of_teachers_stay_behind(name, tmp_path):
    minibatch = make_minibatches()[0]
    samples = [
        replace(
            sample,
            scores=sample.scores
            | {name: np.ones((sample.num_trained_tokens, 50), np.float32)}
            | {"teacher": np.ones(sample.num_trained_tokens, np.float32)},
        )
        for sample in minibatch.samples
    ]
    minibatch, heard = Minibatch(0, tuple(samples)), Heard()
    step = SimpleNamespace(losses=[torch.tensor(0.1)])
    recorder = Recorder(None, step)
    recorder.begin(heard, suspects_of(tmp_path))
    recorder.keep(minibatch, collate(samples, aggregation="sample-mean", share_prompts=False))
    bad = trained_step(minibatch, suspects=(0,))
    recorder.end_step(bad.end, bad.result, number=1)
    (trained,) = heard.steps[0].minibatches
    for sample in (*trained.minibatch.samples, *kept_in(tmp_path)[1][0].samples):
        assert set(sample.scores) == {"reference", "teacher"}
    assert all(name in sample.scores for sample in samples)  # which are trained yet
    packed = replace(make_minibatches()[0], dense={name: torch.ones(1, 50)})
    small, left_out = without_too_large(packed)
    assert (small.dense, left_out) == ({}, [name])


def test_only_the_suspects_of_the_step_are_kept(tmp_path):
    suspects = suspects_of(tmp_path)
    good, filler, bad = make_minibatches()
    suspects.write(trained_step(good, bad))
    assert not (tmp_path / "non_finite").exists()
    suspects.write(trained_step(good, filler, bad, number=2, suspects=(1, 2)))
    paths, kept = kept_in(tmp_path)
    assert [len(minibatch.samples) for minibatch in kept] == [1]
    suspects.write(trained_step(filler, number=3, suspects=(0,)))
    assert kept_in(tmp_path)[0] == paths


def test_a_rank_keeps_a_bounded_number_of_files(tmp_path):
    of_ranks = [suspects_of(tmp_path, rank) for rank in (1, 11)]
    bad = make_minibatches()[2]
    for number in range(MAX_SUSPECTS + 3):
        for suspects in of_ranks:
            suspects.write(trained_step(bad, number=number, suspects=(0,)))
    names = {path.name for path in (tmp_path / "non_finite").iterdir()}
    assert names == {f"step_{n}_rank_{rank}.log" for n in range(MAX_SUSPECTS) for rank in (1, 11)}


def test_a_disk_that_refuses_costs_the_file_only(tmp_path, caplog):
    (tmp_path / "non_finite").write_text("in the way")
    suspects_of(tmp_path).write(trained_step(make_minibatches()[2], suspects=(0,)))
    assert "step 1 could not be kept" in caplog.text


class Trap:
    def __init__(self, sprung):
        self.sprung = sprung

    def __reduce__(self):
        return Path.touch, (self.sprung,)


def test_nothing_is_unpickled(tmp_path):
    np.savez(tmp_path / "foreign.npz", format=np.array([Trap(tmp_path / "sprung")], dtype=object))
    with pytest.raises(DataError, match=r"foreign\.npz is damaged at byte 0: no record begins"):
        suspected_minibatches(tmp_path / "foreign.npz")
    assert not (tmp_path / "sprung").exists()


def test_a_torn_file_is_named(tmp_path):
    suspects_of(tmp_path).write(trained_step(*make_minibatches(), suspects=(0, 2)))
    (path,), _ = kept_in(tmp_path)
    content = path.read_bytes()
    for size in range(0, len(content), 97):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=path.name):
            suspected_minibatches(path)
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=path.name):
        suspected_minibatches(path)
