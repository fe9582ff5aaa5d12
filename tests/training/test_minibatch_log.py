"""The log of minibatches gives back what ranks trained, and says what it has lost."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from full_disk import no_file_beyond
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import trained_step
from oracle import make_config, make_row, sample_of_rows
from test_minibatch_recorder import facts, samples

from async_grpo.model.collate import collate
from async_grpo.training.minibatch_codec import decode, encode, frame, read_frames
from async_grpo.training.minibatch_log import (
    LOG_FOLDER,
    last_batch,
    log_files,
    logged_minibatch,
    logged_runs,
    logged_steps,
)
from async_grpo.training.recorder import NUM_FILES, MinibatchLog
from async_grpo.types import EndOfStep, Episode, Minibatch
from async_grpo.util.errors import DataError


def ranks(rank=0, world_size=1):
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))


def make_minibatch(ordinal=0, length=3):
    row = make_row([1, 2], list(range(3, 3 + length)))
    return Minibatch(ordinal, (replace(sample_of_rows([row]), ordinal=ordinal),))


def make_log(folder, *, first=0, gib=1.0, rank=0, world_size=1, batches=(), length=3):
    """One step a batch, of two minibatches, the second one a filler."""
    config = make_config(output_dir=str(folder), replay_max_gib=gib)
    alone = ranks(rank, world_size)
    log = MinibatchLog(config.recording, alone, first=first, options=config.options())
    for batch in batches:
        both = make_minibatch(batch, length), Minibatch(1, ())
        log.write(trained_step(*both, batch=batch, loss=float("nan"), num_tokens=length))
    return log


def steps(folder, batches, rank=0):
    return list(logged_steps(folder / LOG_FOLDER, rank=rank, batches=batches))


@settings(max_examples=60, deadline=None)
@given(members=st.lists(samples(), max_size=3), share=st.booleans(), index=st.integers(0, 9))
def test_a_decoded_minibatch_is_packed_as_the_encoded_one(members, share, index):
    found = decode(encode(Minibatch(index, tuple(members))), round_index=index)
    assert found.round_index == index
    was, now = (
        collate(each, aggregation="sample-mean", share_prompts=share)
        for each in (members, found.samples)
    )
    assert facts(now) == facts(was)
    parts = [part for sample in members for part in sample.parts()]
    assert [sample.key for sample in found.samples] == [part.key for part in parts]
    assert [sample.num_tokens for sample in found.samples] == [part.num_tokens for part in parts]


def test_experts_of_rows_that_have_them_come_back_beside_rows_without():
    members = [make_minibatch(ordinal, 2 + ordinal).samples[0] for ordinal in range(3)]
    for number in (0, 2):
        (row,) = members[number].episode.rows
        experts = np.arange((row.num_tokens - 1) * 4, dtype=np.uint8).reshape(-1, 4)
        episode = Episode((replace(row, experts=experts),))
        members[number] = replace(members[number], episode=episode)
    found = decode(encode(Minibatch(0, tuple(members))), round_index=0).samples
    for was, now in zip(members, found, strict=True):
        (old,), (new,) = was.episode.rows, now.episode.rows
        assert (new.experts is None) == (old.experts is None)
        assert old.experts is None or np.array_equal(new.experts, old.experts)


def test_scores_that_a_given_row_lacks_stay_away_and_ids_stay_ids():
    sampled, given_row = make_row([1], [2, 3]), replace(make_row([1], [4]), logprobs=None)
    top = {"teacher:math": np.arange(4, dtype=np.int32).reshape(2, 2)}
    members = (
        replace(sample_of_rows([sampled]), scores=top),
        replace(sample_of_rows([given_row]), scores={}, index=1),
    )
    first, second = decode(encode(Minibatch(0, members)), round_index=0).samples
    assert first.scores["teacher:math"].tolist() == [[0, 1], [2, 3]]
    assert first.scores["teacher:math"].dtype == np.int32
    assert second.scores == {} and second.episode.is_given


def test_what_would_be_too_large_is_named_and_cannot_be_replayed(tmp_path):
    hidden = {"teacher.hidden": np.zeros((3, 8), np.float32)}
    (sample,) = make_minibatch().samples
    minibatch = Minibatch(0, (replace(sample, scores=hidden),))
    make_log(tmp_path).write(trained_step(minibatch))
    (step,) = steps(tmp_path, range(1))
    with pytest.raises(DataError, match=r"not kept teacher\.hidden"):
        logged_minibatch(step.minibatches[0])


def test_a_log_gives_back_steps_to_the_bit(tmp_path):
    make_log(tmp_path, batches=(0, 1))
    first, second = steps(tmp_path, range(2))
    assert last_batch(tmp_path / LOG_FOLDER) == 1
    assert second.end == EndOfStep(1, 0, True, num_samples=1, num_tokens=3)
    assert second.facts["grad_norm"] == 0.1 and second.facts["digest"] == 1
    (minibatch, sums), (filler, _) = map(logged_minibatch, second.minibatches)
    assert minibatch.samples[0].ordinal == 1 and filler == filler and filler.samples == ()
    assert np.isnan(sums.loss) and sums.num_tokens == 3 and sums.weight == pytest.approx(1.0)
    assert sums.gradients != logged_minibatch(first.minibatches[0])[1].gradients
    (run,) = logged_runs(tmp_path / LOG_FOLDER, rank=0)
    assert run["config"]["batch_size"] == make_config().batching.batch_size
    assert run["machine"]["torch"] == torch.__version__


def test_a_run_that_goes_on_writes_its_batches_in_the_place_of_the_old_ones(tmp_path):
    for rank in (0, 1):
        make_log(tmp_path, batches=range(4), rank=rank, world_size=2)
    newest = log_files(tmp_path / LOG_FOLDER, rank=0)[-1]
    with newest.open("ab") as file:
        file.write(frame({"kind": "minibatch", "batch": 4})[:-5])  # a process was killed here
    make_log(tmp_path, first=2, batches=(2,), length=5)  # with one rank now
    assert [step.end.batch for step in steps(tmp_path, range(3))] == [0, 1, 2]
    assert steps(tmp_path, range(2, 3))[0].end.num_tokens == 5
    assert [step.end.batch for step in steps(tmp_path, range(2), rank=1)] == [0, 1]
    with pytest.raises(DataError, match="lacks step 0 of batch 2 of rank 1"):
        steps(tmp_path, range(3), rank=1)
    runs = logged_runs(tmp_path / LOG_FOLDER, rank=0)
    assert [(run["batch"], run["world_size"]) for run in runs] == [(0, 2), (2, 1)]


def test_the_oldest_batches_make_room_for_new_ones(tmp_path):
    size = 200_000
    make_log(tmp_path, gib=size / 2**30, batches=range(300))
    files = log_files(tmp_path / LOG_FOLDER, rank=0)
    assert 2 < len(files) <= NUM_FILES
    assert size / 2 < sum(file.stat().st_size for file in files) <= size
    first = logged_runs(tmp_path / LOG_FOLDER, rank=0)[0]["batch"]
    assert first > 0
    kept = steps(tmp_path, range(first, 300))
    assert [step.end.batch for step in kept] == list(range(first, 300))


def test_a_full_disk_costs_minibatches_which_are_counted(tmp_path, caplog):
    log = make_log(tmp_path, batches=(0,))
    with no_file_beyond(log_files(tmp_path / LOG_FOLDER)[0].stat().st_size + 10):
        log.write(trained_step(make_minibatch(), batch=1))
    assert log.num_lost == 1
    assert "the run goes on" in caplog.text
    with pytest.raises(DataError, match="lacks step 0 of batch 1 of rank 0"):
        steps(tmp_path, range(2))


def test_a_flipped_bit_is_found(tmp_path):
    make_log(tmp_path, batches=(0,))
    (path,) = log_files(tmp_path / LOG_FOLDER)
    content = bytearray(path.read_bytes())
    damaged = next(record for record in read_frames(path) if record.num_array_bytes > 100)
    content[damaged.end - 1] ^= 1
    path.write_bytes(content)
    (step,) = steps(tmp_path, range(1))
    with pytest.raises(DataError, match=f"{path.name} is damaged between the bytes"):
        logged_minibatch(step.minibatches[0])


def kept(folder):
    """(the file's name, batch, whether it is damaged) of every record."""
    return [(path.name, record.checked()["batch"]) for path in log_files(folder / LOG_FOLDER)
            for record in read_frames(path)]  # fmt: skip


def test_no_flipped_bit_keeps_a_run_from_going_on_or_costs_a_record_in_silence(tmp_path, caplog):
    make_log(tmp_path, batches=range(3))
    (path,) = log_files(tmp_path / LOG_FOLDER)
    content, expected = path.read_bytes(), kept(tmp_path)
    frames = list(read_frames(path))
    places = {
        f.start + offset for f in frames for offset in (*range(20), 20 + len(f.text) // 2, 25)
    }
    places |= {f.end - 1 for f in frames} | {len(content) - 40}
    for number, place in enumerate(sorted(places)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << number % 8
        path.write_bytes(damaged)
        caplog.clear()
        make_log(tmp_path, first=1000)
        aside = path.with_name(f"{path.name}.damaged")
        if path.exists():  # the last record's length: it seems to have been cut short
            assert "cut short, which is removed" in caplog.text
            assert kept(tmp_path) == expected[:-1] and place >= frames[-1].start
        else:
            assert caplog.text.count("damaged at byte") + caplog.text.count("damaged between") == 1
            assert f"set aside as {aside.name}" in caplog.text
            assert aside.read_bytes() == damaged
            aside.unlink()
    path.write_bytes(content)
    caplog.clear()
    make_log(tmp_path, first=1000)
    assert kept(tmp_path) == expected and not caplog.text


def test_damage_behind_the_batches_that_are_kept_goes_with_the_rest(tmp_path):
    make_log(tmp_path, batches=range(3))
    (path,) = log_files(tmp_path / LOG_FOLDER)
    last = list(read_frames(path))[-1]
    content = bytearray(path.read_bytes())
    content[last.end - 1] ^= 1
    path.write_bytes(content)
    make_log(tmp_path, first=2)
    assert {batch for _, batch in kept(tmp_path)} == {0, 1}


def test_the_end_of_a_step_is_checked(tmp_path):
    make_log(tmp_path, batches=(0,))
    (path,) = log_files(tmp_path / LOG_FOLDER)
    path.write_bytes(path.read_bytes().replace(b'"grad_norm": 0.1', b'"grad_norm": 0.3'))
    for read in (lambda: steps(tmp_path, range(1)), lambda: last_batch(tmp_path / LOG_FOLDER)):
        with pytest.raises(DataError, match=f"{path.name} is damaged between the bytes"):
            read()


def test_a_minibatch_whose_facts_are_damaged_is_named(tmp_path):
    make_log(tmp_path, batches=(0,))
    (path,) = log_files(tmp_path / LOG_FOLDER)
    path.write_bytes(path.read_bytes().replace(b'"left_out"', b'"left_ouu"'))
    (step,) = steps(tmp_path, range(1))
    with pytest.raises(DataError, match=f"{path.name} is damaged between the bytes"):
        logged_minibatch(step.minibatches[0])
