"""A batch that is trained again comes to the same bits, or the minibatch that does not is named."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learners import make_learner
from oracle import make_config, oracle_twin, random_samples, sent, tiny_model

from async_grpo.checkpoint.reader import Manifest
from async_grpo.checkpoint.resume import Start
from async_grpo.run import replaying
from async_grpo.run.replaying import find_checkpoint, read_record, replay_step
from async_grpo.training.minibatch_codec import encode, frame, read_frames
from async_grpo.training.minibatch_log import (
    DIGEST_FORM,
    INTEGERS,
    LOG_FOLDER,
    as_digest,
    bit_sums,
    log_files,
    logged_minibatch,
    logged_steps,
)
from async_grpo.training.recorder import MinibatchLog
from async_grpo.types import EndOfStep, Minibatch
from async_grpo.util.errors import ConfigError, DataError

ALONE = SimpleNamespace(
    rank=0, world_size=1, device=torch.device("cpu"), gather=lambda value: [value]
)
NUM_STEPS = 4  # two a batch


@pytest.fixture(scope="module")
def items():
    """Two minibatches a step, and its end."""
    twin, found = oracle_twin(tiny_model(tied=True)), []
    for step in range(NUM_STEPS):
        samples = random_samples(np.random.default_rng(step), 4, model=twin)
        rounds = [Minibatch(n, tuple(samples[2 * n : 2 * n + 2])) for n in range(2)]
        batch, step_in_batch = divmod(step, 2)
        end = EndOfStep(batch, step_in_batch, step_in_batch == 1, 4, 9, sent=sent(samples))
        found += [*rounds, end]
    return found


def record(tmp_path, items, **options):
    """The folder of a run that has recorded these."""
    learner = make_learner(tmp_path, learning_rate=1e-3, **options)
    config = learner.config
    log = MinibatchLog(config.recording, ALONE, first=0, options=config.options())
    learner.recorder.begin(log)
    for item in learner.in_passes(items):
        learner.accumulate(item) if isinstance(item, Minibatch) else learner.update(item)
    return tmp_path


@pytest.fixture
def recorded(tmp_path, items):
    return record(tmp_path, items)


def replayed(folder, **options):
    """The first difference, and how many steps were trained again."""
    learner = make_learner(folder / "elsewhere", learning_rate=1e-3, **options)
    steps = logged_steps(folder / LOG_FOLDER, rank=0, batches=range(2))
    for number, step in enumerate(steps, 1):
        if difference := replay_step(step, learner, ALONE):
            return str(difference), number
    return None, number


def altered(folder, number, change):
    """Rewrite the `number`-th minibatch of the log, with a checksum that fits."""
    (path,) = log_files(folder / LOG_FOLDER)
    records = [(record.facts, record.load()) for record in read_frames(path)]
    places = [n for n, (facts, _) in enumerate(records) if facts["kind"] == "minibatch"]
    facts, _ = records[places[number]]
    record = [each for each in read_frames(path) if each.facts["kind"] == "minibatch"][number]
    minibatch, _ = logged_minibatch(record)
    first, *others = minibatch.samples
    changed = replace(minibatch, samples=(change(first), *others))
    records[places[number]] = facts, encode(changed)
    path.write_bytes(b"".join(frame(*each) for each in records))


def test_recorded_steps_come_to_the_same_bits(recorded):
    assert replayed(recorded) == (None, NUM_STEPS)


def test_a_minibatch_that_was_changed_by_one_bit_is_named(recorded):
    def change(sample):
        return replace(sample, advantage=float(np.nextafter(np.float32(sample.advantage), 9)))

    altered(recorded, 5, change)
    difference, number = replayed(recorded)
    place = "gradient step 3 (batch 1), round 1, rank 0: the "
    assert difference.startswith(place), difference
    assert number == 3


def test_later_passes_are_recorded_with_what_they_compare_with_and_come_to_the_same_bits(
    tmp_path, items
):
    record(tmp_path, items, num_passes=2)
    assert replayed(tmp_path, num_passes=2) == (None, 2 * NUM_STEPS)

    def change(sample):
        far = np.float32(5 * np.sign(sample.advantage))  # to where the clip has a gradient
        return replace(sample, scores={**sample.scores, "old": sample.scores["old"] + far})

    altered(tmp_path, 5, change)
    difference, number = replayed(tmp_path, num_passes=2)
    assert difference.startswith("gradient step 3 (batch 0), round 1, rank 0: the sum of losses")
    assert number == 3


def test_gradients_in_the_hosts_memory_are_read_once_a_step_and_compared_all_the_same(
    tmp_path, items
):
    record(tmp_path, items, offload="parameters")
    assert replayed(tmp_path, offload="parameters") == (None, NUM_STEPS)
    digests = [
        [logged_minibatch(each)[1].gradients for each in step.minibatches]
        for step in logged_steps(tmp_path / LOG_FOLDER, rank=0, batches=range(2))
    ]
    assert all(first == 0 and last for first, last in digests)
    (path,) = log_files(tmp_path / LOG_FOLDER)
    records = [(each.facts, each.load()) for each in read_frames(path)]
    sums = [facts["sums"] for facts, _ in records if facts["kind"] == "minibatch"]
    sums[3]["gradients"] += 1
    path.write_bytes(b"".join(frame(*each) for each in records))
    difference, number = replayed(tmp_path, offload="parameters")
    place = "gradient step 2 (batch 0), round 1, rank 0: the digest of summed gradients"
    assert difference.startswith(place) and number == 2


@given(
    values=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    start=st.integers(0, 3),
    bit=st.integers(0, 15),
)
def test_a_digest_knows_every_bit_and_no_place_in_memory(values, dtype, start, bit):
    size = dtype.itemsize
    integers = INTEGERS[size]
    bits = torch.tensor(values).to(integers)
    place = torch.zeros(start + len(values), dtype=integers)
    place[start:] = bits
    digest = as_digest(bit_sums([bits.view(dtype)]))
    assert as_digest(bit_sums([place[start:].view(dtype)])) == digest
    for index in range(len(values)):
        changed = bits.clone()
        changed[index] ^= 1 << (bit if bit < 8 * size - 1 else 0)
        assert as_digest(bit_sums([changed.view(dtype)])) != digest


def test_another_order_of_two_minibatches_is_a_difference_in_the_first_of_them(recorded):
    (path,) = log_files(recorded / LOG_FOLDER)
    records = [(record.facts, record.load()) for record in read_frames(path)]
    records[1:3] = [(records[1][0], records[2][1]), (records[2][0], records[1][1])]
    path.write_bytes(b"".join(frame(*each) for each in records))
    difference, _ = replayed(recorded)
    assert difference.startswith("gradient step 1 (batch 0), round 0, rank 0: the number of tr")


@pytest.mark.parametrize("name, what", [("grad_norm", "norm"), ("digest", "digest of the param")])
def test_a_step_that_comes_to_something_else_is_named(recorded, name, what):
    (path,) = log_files(recorded / LOG_FOLDER)
    records = [(record.facts, record.load()) for record in read_frames(path)]
    ends = [facts for facts, _ in records if facts["kind"] == "end"]
    ends[1][name] += 1
    path.write_bytes(b"".join(frame(*each) for each in records))
    difference, number = replayed(recorded)
    assert difference.startswith("gradient step 2 (batch 0), rank 0: the ") and what in difference
    assert number == 2


def test_a_damaged_minibatch_is_named(recorded):
    (path,) = log_files(recorded / LOG_FOLDER)
    record = [each for each in read_frames(path) if each.facts["kind"] == "minibatch"][3]
    content = bytearray(path.read_bytes())
    content[record.end - 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="round 1, rank 0, in step 1 of batch 0 cannot be read"):
        replayed(recorded)


def test_the_earliest_difference_of_all_ranks_is_told_on_each_of_them(recorded):
    def change(sample):
        return replace(sample, advantage=sample.advantage + 1)

    altered(recorded, 1, change)
    learner = make_learner(recorded / "elsewhere", learning_rate=1e-3)
    earlier = (0, 2), replaying.Difference("round 0, rank 1", "the sum of losses", 1.0, 2.0)
    ranks = SimpleNamespace(
        rank=0, gather=lambda own: [own, [earlier]] if isinstance(own, list) else [own]
    )
    (step, *_) = logged_steps(recorded / LOG_FOLDER, rank=0, batches=range(2))
    assert replay_step(step, learner, ranks) is earlier[1]


def run_record(batch, world_size=1, **options):
    config = make_config(**options).options()
    return {"kind": "run", "batch": batch, "config": config, "world_size": world_size,
            "digests": DIGEST_FORM, "machine": {}}  # fmt: skip


def write_log(folder, *files, last):
    """Files that begin with these records, and a last batch that has ended."""
    log = folder / LOG_FOLDER
    log.mkdir()
    for run in files:
        (log / f"rank_0.batch_{run['batch']}.log").write_bytes(frame(run))
    end = {"kind": "end", "batch": last, "step_in_batch": 0, "is_last_of_batch": True}
    with (log / f"rank_0.batch_{files[-1]['batch']}.log").open("ab") as file:
        file.write(frame(end))


def test_a_record_reaches_as_far_as_options_and_ranks_stay_the_same(tmp_path):
    write_log(
        tmp_path,
        run_record(4),
        run_record(8, output_dir="moved"),
        run_record(12, world_size=2),
        run_record(20, world_size=2, learning_rate=1e-5),
        last=22,
    )
    assert read_record(tmp_path, batch=9).batches == range(4, 12)
    assert read_record(tmp_path, batch=12).batches == range(12, 20)
    latest = read_record(tmp_path, batch=None)
    assert latest.batches == range(20, 23)
    assert (latest.world_size, latest.config.optimizer.learning_rate) == (2, 1e-5)
    for batch in (3, 23):
        with pytest.raises(ConfigError, match=f"from 4 to 22, got {batch}"):
            read_record(tmp_path, batch=batch)


def test_digests_of_another_form_are_told_instead_of_a_difference(tmp_path):
    first = run_record(0)
    del first["digests"]  # as all records of form 1
    write_log(tmp_path, first, run_record(4), last=6)
    assert read_record(tmp_path, batch=4).batches == range(4, 7)
    told = r"of form 2, which .* those of batches 0 to 3 are of form 1: replay them with the code"
    with pytest.raises(ConfigError, match=told):
        read_record(tmp_path, batch=3)


def test_what_is_recorded_now_may_be_replayed(recorded):
    assert read_record(recorded, batch=None).batches == range(2)


def test_digests_of_the_form_have_these_values():
    """Whoever changes one of them gives the form another number."""
    tensors = [torch.tensor([1.0, -2.5, 3.0]), torch.tensor([0.5, 7.0]).bfloat16()]
    assert (DIGEST_FORM, as_digest(bit_sums(tensors))) == (2, 0x93E56B6B7AC07FE0)


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no whole batch: name another"):
        read_record(tmp_path, batch=None)


def test_the_latest_good_checkpoint_before_the_batch_is_taken(tmp_path, monkeypatch):
    write_log(tmp_path, run_record(3), last=9)
    for name in ("batch_2", "batch_4", "batch_6", "batch_6.2", "batch_9"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    manifest = Manifest(batches=0, world_size=1, config={}, hashes={}, state={})
    monkeypatch.setattr(replaying, "read_checkpoint", lambda path: manifest)
    record = read_record(tmp_path, batch=None)
    for batch, name in ((4, "batch_4"), (8, "batch_6.2"), (9, "batch_9")):
        assert find_checkpoint(record, batch).folder == tmp_path / "checkpoints" / name
    with pytest.raises(ConfigError, match=r"needs a checkpoint after 3 to 3 batches"):
        find_checkpoint(record, 3)


def test_a_run_that_is_recorded_from_its_beginning_needs_no_checkpoint(tmp_path):
    write_log(tmp_path, run_record(0), last=1)
    assert find_checkpoint(read_record(tmp_path, batch=None), 1) == Start()


def test_the_order_of_facts_is_no_difference():
    assert replaying._is_equal({"a": 1.0, "b": float("nan")}, json.loads('{"b": NaN, "a": 1.0}'))
