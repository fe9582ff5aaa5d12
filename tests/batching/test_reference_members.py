"""Reference answers as members of their groups (--use-ref-answers): books, D and statistics."""

import json
from dataclasses import replace

import numpy as np
import pytest
from script import Script
from scripted import make_completion
from scripted_run import REFERRED, make_config
from test_histories import ends, samples_of, watched

from async_grpo.batching.failures import SlotFailed
from async_grpo.batching.pipeline import by_length_limit
from async_grpo.batching.supervised import reference_of, without_references
from async_grpo.types import Episode, Group, Sample, Verdict

SIZE, SLOTS = 3, 4
USED = {"use_ref_answers": True, "num_training_batches": 1, "batch_size": SLOTS}
TRAINED = USED | {"ref_answer_coefficient": 0.5}


def test_a_reference_is_trained_where_no_sampled_member_has_an_advantage():
    script = Script(config=make_config(**TRAINED), barren=frozenset(range(SLOTS)))
    ranks, _, running = watched(script)
    (end,) = ends(ranks)
    assert end.fates == dict.fromkeys(end.fates, 0) | {
        "trained": SLOTS, "zero_contribution": SLOTS * SIZE,
    }  # fmt: skip
    assert end.num_samples == SLOTS * (SIZE + 1)
    trained = samples_of(ranks, 0)
    assert {sample.index for sample in trained} == {SIZE}
    assert all(sample.episode.is_given for sample in trained)
    assert sum(own.num_samples for own in end.sent) == SLOTS
    assert running.batcher._ledger.admitted_samples == SLOTS * (SIZE + 1)


@pytest.mark.parametrize("options", [USED, TRAINED])
def test_its_reward_moves_the_baseline_of_its_group(options):
    script = Script(config=make_config(**options))
    ranks, _, _ = watched(script)
    (end,) = ends(ranks)
    is_trained = options is TRAINED
    assert end.num_samples == SLOTS * (SIZE + is_trained)
    assert end.sums["given_samples"] == SLOTS * is_trained
    assert end.sums["ref_answers"] == SLOTS
    alone = Script(config=make_config(num_training_batches=1, batch_size=SLOTS))
    unmoved = {(s.ordinal, s.index): s.advantage for s in samples_of(watched(alone)[0], 0)}
    moved = 0
    for sample in samples_of(ranks, 0):
        if sample.index < SIZE:
            rewards = [
                *script.rewards(sample.ordinal),
                *script.reference(sample.ordinal, 0).values(),
            ]
            assert sample.advantage == rewards[sample.index] - np.mean(rewards)
            moved += sample.advantage != unmoved.get((sample.ordinal, sample.index), 0.0)
    assert moved > 3


@pytest.mark.parametrize(("options", "fate"), [(USED, "statistics"), (TRAINED, "trained")])
def test_the_dump_has_it_with_its_reward_and_its_fate(options, fate, tmp_path):
    own = {"output_dir": str(tmp_path), "dump_samples_filename": "samples.jsonl"}
    script = Script(config=make_config(**options | own))
    watched(script)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    given = {line["ordinal"]: line for line in lines if line["given"]}
    assert len(lines) == SLOTS * (SIZE + 1) and len(given) == SLOTS
    for ordinal, line in given.items():
        assert (line["fate"], line["index"], line["advantage"]) == (fate, SIZE, None)
        assert (line["num_trained_tokens"] > 0) == (fate == "trained")
        assert line["reward"] == script.reference(ordinal, 0)[SIZE]


def test_a_group_of_its_reference_alone_has_failed():
    sampled = cut_sample()
    reference = replace(sampled, index=1, episode=reference_of(REFERRED[0])[0])
    with pytest.raises(SlotFailed, match="all of its 1 outputs were cut"):
        by_length_limit((sampled, reference), "invalidate")
    (kept, zeroed), left_out = by_length_limit((reference, sampled), "zero_reward")
    assert (kept.verdict.status, zeroed.verdict.status, left_out) == ("scored", "unscorable", ())


def cut_sample():
    turn = make_completion(None, num_tokens=5, finish_reason="length")
    episode = Episode.of_turn(REFERRED[0].input_token_ids, turn)
    return Sample(0, 0, REFERRED[0], episode, Verdict.scored(1.0), advantage=0.0)


def test_of_the_statistics_alone_it_leaves_the_group():
    sampled = cut_sample()
    reference = replace(sampled, index=1, episode=reference_of(REFERRED[0])[0])
    group = without_references(Group(0, 0, (sampled, reference)))
    (left,) = group.references
    assert (group.samples, left.index, left.num_trained_tokens) == ((sampled,), 1, 0)
    assert without_references(plain := Group(0, 0, (sampled,))) is plain
