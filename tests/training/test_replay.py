"""What made a step impossible comes back from its file, and makes it impossible again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import make_learner, make_minibatches
from oracle import make_sample, sent

from async_grpo.errors import DataError
from async_grpo.training.replay import MAX_FILES, Replay, load_minibatches, save_minibatches
from async_grpo.training.step import NON_FINITE
from async_grpo.types import EndOfStep, Episode, Minibatch, Verdict, VersionSpan, WeightsVersion

TOKENS = st.lists(st.integers(0, 63), min_size=1, max_size=6)


@st.composite
def samples(draw):
    output = draw(TOKENS)
    value = st.floats(width=32)
    row = st.lists(value, min_size=len(output), max_size=len(output))
    cut = draw(st.integers(0, len(output)))
    versions = [WeightsVersion(draw(st.integers(0, 3)), draw(st.integers(0, 99))) for _ in "ab"]
    sample = make_sample(
        draw(TOKENS),
        output,
        mask=draw(st.lists(st.booleans(), min_size=len(output), max_size=len(output))),
        behaviour=draw(row),
        reference=draw(st.none() | row),
        advantage=draw(st.floats()),
        ordinal=draw(st.integers(0, 2**40)),
    )
    math_scores = {"teacher:math": np.ones((len(output), 2), np.float32)}
    (row,) = sample.episode.rows
    row = replace(
        row,
        logprobs=draw(st.sampled_from([row.logprobs, None])),
        weights_versions=(
            VersionSpan(versions[0], 0, cut),
            VersionSpan(versions[1], cut, len(output)),
        )[: draw(st.integers(1, 2))],
    )
    verdict = Verdict(
        draw(st.sampled_from(["scored", "unscorable"])), draw(st.floats()), None, "", "", 0.0
    )
    return replace(
        sample,
        index=draw(st.integers(0, 9)),
        advantage=draw(st.sampled_from([sample.advantage, sample.episode.rows[0].logprobs])),
        scores=sample.scores | draw(st.sampled_from([{}, math_scores])),
        episode=Episode((row,)),
        verdict=verdict,
        row=draw(st.integers(0, 3)),
        num_trained_elsewhere=draw(st.integers(0, 99)),
    )


MINIBATCHES = st.builds(Minibatch, st.integers(0, 9), st.lists(samples(), max_size=3).map(tuple))


def facts(sample):
    """Everything that the loss reads of a sample, or that tells where it comes from."""
    (row,) = sample.episode.rows
    arrays = [
        row.prompt_token_ids,
        row.token_ids,
        *([] if row.logprobs is None else [row.logprobs]),
        row.loss_mask,
        *([sample.advantage] if np.ndim(sample.advantage) else []),
        *(values for _, values in sorted(sample.scores.items())),
    ]
    plain = [
        sample.ordinal,
        sample.index,
        [] if np.ndim(sample.advantage) else np.float64(sample.advantage).tobytes(),
        sorted(sample.scores),
        np.float64(sample.verdict.reward).tobytes(),
        sample.verdict.status,
        row.weights_versions,
        sample.row,
        sample.num_trained_elsewhere,
    ]
    return plain, [(array.dtype, array.tolist()) for array in arrays]


@settings(max_examples=50, deadline=None)
@given(minibatches=st.lists(MINIBATCHES, min_size=1, max_size=3))
def test_a_file_gives_back_what_the_loss_reads(minibatches, tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "kept.npz"
    save_minibatches(path, minibatches)
    loaded = load_minibatches(path)
    assert [m.round_index for m in loaded] == [m.round_index for m in minibatches]
    for got, expected in zip(loaded, minibatches, strict=True):
        # Through text, where NaN equals itself.
        assert str([facts(s) for s in got.samples]) == str([facts(s) for s in expected.samples])
    assert [file.name for file in path.parent.iterdir()] == ["kept.npz"]


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
    assert [sample.ordinal for sample in kept.samples] == [2]
    again.accumulate(kept)
    result = again.update(end(2, 1, [kept]))
    assert (result.skipped, result.suspects) == (NON_FINITE, (0,))
    assert result.metrics["kl_sum"] == first.metrics["kl_sum"] == np.inf


def test_only_the_suspects_of_the_step_are_kept(tmp_path):
    replay = Replay(str(tmp_path), rank=0)
    good, filler, bad = make_minibatches()
    for minibatch in (good, bad):
        replay.keep(minibatch)
    assert replay.end_step(1, suspects=()) is None
    for minibatch in (good, filler, bad):
        replay.keep(minibatch)
    path = replay.end_step(2, suspects=(1, 2))
    assert [len(minibatch.samples) for minibatch in load_minibatches(path)] == [1]
    replay.keep(filler)
    assert replay.end_step(3, suspects=(0,)) is None
    assert list((tmp_path / "non_finite").iterdir()) == [path]


def test_a_rank_keeps_a_bounded_number_of_files(tmp_path):
    replays = [Replay(str(tmp_path), rank=rank) for rank in (1, 11)]
    bad = make_minibatches()[2]
    for step in range(MAX_FILES + 3):
        for replay in replays:
            replay.keep(bad)
            replay.end_step(step, suspects=(0,))
    names = {path.name for path in (tmp_path / "non_finite").iterdir()}
    assert names == {f"step_{n}_rank_{rank}.npz" for n in range(MAX_FILES) for rank in (1, 11)}


def test_a_disk_that_refuses_costs_the_file_only(tmp_path, caplog):
    (tmp_path / "non_finite").write_text("in the way")
    replay = Replay(str(tmp_path), rank=0)
    replay.keep(make_minibatches()[2])
    assert replay.end_step(1, suspects=(0,)) is None
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
    save_minibatches(path, make_minibatches())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"torn\.npz"):
        load_minibatches(path)


@pytest.mark.parametrize("columns", [{}, {"format": np.array(1)}, {"format": np.array([1, 1])}])
def test_another_format_is_refused(columns, tmp_path):
    np.savez(tmp_path / "foreign.npz", **columns)
    with pytest.raises(DataError, match="format 2"):
        load_minibatches(tmp_path / "foreign.npz")
