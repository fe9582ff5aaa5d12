"""What made a step impossible comes back from its file, and makes it impossible again."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import make_learner, make_minibatches
from oracle import make_row, sample_of_rows, sent

from async_grpo.model.collate import collate
from async_grpo.training.step import NON_FINITE
from async_grpo.training.suspects import MAX_FILES, Suspects, load_minibatches, save_minibatches
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
def packed_minibatches(draw):
    """Samples, and how they are packed."""
    members = draw(st.lists(samples(), min_size=1, max_size=3))
    if draw(st.booleans()):
        two = {m: np.ones((len(m.scores["reference"]), 2), np.float32) for m in members}
        members = [replace(m, scores=m.scores | {"teacher:math": two[m]}) for m in members]
    packed = collate(members, aggregation="sample-mean", share_prompts=draw(st.booleans()))
    return Minibatch(0, tuple(members)), packed


def facts(packed):
    """All that model and loss read, through text, where NaN equals itself."""
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    values |= values.pop("scores")
    return {
        name: (str(value.dtype), str(value.tolist())) if torch.is_tensor(value) else value
        for name, value in values.items()
    }


@settings(max_examples=50, deadline=None)
@given(kept=st.lists(packed_minibatches(), min_size=1, max_size=3))
def test_a_file_gives_back_what_the_loss_reads(kept, tmp_path_factory):
    path = tmp_path_factory.mktemp("suspects") / "kept.npz"
    save_minibatches(path, kept)
    loaded = load_minibatches(path)
    assert [facts(packed) for packed in loaded] == [facts(packed) for _, packed in kept]
    with np.load(path) as file:
        for number, (minibatch, _) in enumerate(kept):
            keys = [part.key for sample in minibatch.samples for part in sample.parts()]
            assert file[f"{number}.keys"].tolist() == [list(key) for key in keys]
    assert [file.name for file in path.parent.iterdir()] == ["kept.npz"]


def packed(minibatch):
    return collate(minibatch.samples, aggregation="sample-mean")


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

    (path,) = (tmp_path / "non_finite").iterdir()
    assert path.name == "step_6_rank_3.npz"
    again = make_learner(tmp_path / "again")
    (kept,) = load_minibatches(path)
    with np.load(path) as file:
        assert file["0.keys"].tolist() == [[2, 0, 0, 0]]
    again.step.accumulate(kept)
    result = again.step.finish(3)
    assert (result.skipped, result.suspects) == (NON_FINITE, (0,))
    assert result.metrics["kl_sum"] == first.metrics["kl_sum"] == np.inf


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
    minibatch = replace(minibatch, samples=tuple(samples))
    whole = collate(minibatch.samples, aggregation="sample-mean", share_prompts=False)
    suspects = Suspects(tmp_path, rank=0)
    suspects.keep(minibatch, whole)
    ((kept, packed_of_it),) = suspects._kept
    assert set(packed_of_it.scores) == set(whole.scores) - {name}
    assert name in whole.scores  # which is trained yet
    assert [sample.scores for sample in kept.samples] == [{}] * len(samples)
    path = tmp_path / "kept.npz"
    save_minibatches(path, [(kept, packed_of_it)])
    (found,) = load_minibatches(path)
    assert set(found.scores) == set(whole.scores) - {name}


def test_only_the_suspects_of_the_step_are_kept(tmp_path):
    suspects = Suspects(str(tmp_path), rank=0)
    good, filler, bad = make_minibatches()
    for minibatch in (good, bad):
        suspects.keep(minibatch, packed(minibatch))
    assert suspects.end_step(1, suspects=()) is None
    for minibatch in (good, filler, bad):
        suspects.keep(minibatch, packed(minibatch))
    path = suspects.end_step(2, suspects=(1, 2))
    assert [kept.num_samples for kept in load_minibatches(path)] == [1]
    suspects.keep(filler, packed(filler))
    assert suspects.end_step(3, suspects=(0,)) is None
    assert list((tmp_path / "non_finite").iterdir()) == [path]


def test_a_rank_keeps_a_bounded_number_of_files(tmp_path):
    of_ranks = [Suspects(str(tmp_path), rank=rank) for rank in (1, 11)]
    bad = make_minibatches()[2]
    for step in range(MAX_FILES + 3):
        for suspects in of_ranks:
            suspects.keep(bad, packed(bad))
            suspects.end_step(step, suspects=(0,))
    names = {path.name for path in (tmp_path / "non_finite").iterdir()}
    assert names == {f"step_{n}_rank_{rank}.npz" for n in range(MAX_FILES) for rank in (1, 11)}


def test_a_disk_that_refuses_costs_the_file_only(tmp_path, caplog):
    (tmp_path / "non_finite").write_text("in the way")
    suspects = Suspects(str(tmp_path), rank=0)
    bad = make_minibatches()[2]
    suspects.keep(bad, packed(bad))
    assert suspects.end_step(1, suspects=(0,)) is None
    assert "step 1 could not be kept" in caplog.text


class Trap:
    def __init__(self, sprung):
        self.sprung = sprung

    def __reduce__(self):
        return Path.touch, (self.sprung,)


def test_nothing_is_unpickled(tmp_path):
    np.savez(tmp_path / "foreign.npz", format=np.array([Trap(tmp_path / "sprung")], dtype=object))
    with pytest.raises(DataError, match=r"foreign\.npz must hold kept minibatches"):
        load_minibatches(tmp_path / "foreign.npz")
    assert not (tmp_path / "sprung").exists()


def test_a_torn_file_is_named(tmp_path):
    path = tmp_path / "torn.npz"
    save_minibatches(path, [(m, packed(m)) for m in make_minibatches()])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"torn\.npz"):
        load_minibatches(path)


@pytest.mark.parametrize("columns", [{}, {"format": np.array(2)}, {"format": np.array([1, 1])}])
def test_another_format_is_refused(columns, tmp_path):
    np.savez(tmp_path / "foreign.npz", **columns)
    with pytest.raises(DataError, match="format 3"):
        load_minibatches(tmp_path / "foreign.npz")
