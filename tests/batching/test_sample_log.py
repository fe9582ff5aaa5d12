import json

import pytest
from full_disk import no_file_beyond
from scripted import make_sample, make_verdict

from async_grpo.batching.sample_files import dump_files
from async_grpo.batching.sample_log import SampleLog
from async_grpo.types import Group, VersionSpan, WeightsVersion

VERSION = WeightsVersion(9, 3)


@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_line_says_what_became_of_a_sample(has_tokens, tmp_path):
    spans = (VersionSpan(VERSION, 0, 1), VersionSpan(WeightsVersion(9, 4), 1, 4))
    verdict = make_verdict(0.5, format_reward=0.25)
    samples = (
        make_sample(VERSION, ordinal=8, index=0, verdict=verdict, advantage=0.7, spans=spans),
        make_sample(VERSION, ordinal=8, index=1, advantage=0.0, finish_reason="length"),
    )
    log = SampleLog(tmp_path / "samples.jsonl", has_tokens=has_tokens)
    log.write(Group(8, 2, samples[:1]), batch=4, fates=("trained",))
    log.write(Group(8, 2, samples[1:]), batch=4, fates=("zero_contribution",))
    first, second = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    columns = {
        "batch": 4,
        "ordinal": 8,
        "attempt": 2,
        "index": 0,
        "fate": "trained",
        "input": "2+2=",
        "output": "four",
        "answer": "4",
        "reward": 0.5,
        "format_reward": 0.25,
        "overlong_penalty": 0.0,
        "kl_penalty": 0.0,
        "advantage": 0.7,
        "verdict": "scored",
        "adapter": "scripted",
        "reason": "",
        "finish_reason": "stop",
        "num_input_tokens": len(samples[0].question.input_token_ids),
        "num_output_tokens": 4,
        "weights_versions": [[str(span.version), span.start, span.stop] for span in spans],
    }
    tokens = {
        "input_token_ids": samples[0].question.input_token_ids.tolist(),
        "output_token_ids": samples[0].completion.token_ids.tolist(),
        "loss_mask": samples[0].completion.loss_mask.tolist(),
        "behaviour_logprobs": samples[0].completion.logprobs.tolist(),
        "reference_logprobs": None,
    }
    assert first == (columns | tokens if has_tokens else columns)
    assert (second["fate"], second["finish_reason"]) == ("zero_contribution", "length")


def test_any_text_makes_one_line(tmp_path):
    reason = "lone surrogate \ud800,\nnew line, \u2028 separator, é"
    sample = make_sample(VERSION, verdict=make_verdict(0.0, reason=reason))
    log = SampleLog(tmp_path / "samples.jsonl")
    log.write(Group(0, 0, (sample,)), batch=0, fates=("trained",))
    (line,) = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert json.loads(line)["reason"] == reason
    assert "é" in line


def test_without_a_path_nothing_is_written(tmp_path):
    SampleLog(None).write(Group(0, 0, (make_sample(VERSION),)), batch=0, fates=("trained",))
    assert not list(tmp_path.iterdir())


def test_samples_of_slots_that_are_sampled_again_are_removed(tmp_path):
    """Also the half line of a process that was killed; the others keep their order and bytes."""
    path = tmp_path / "samples.jsonl"
    kept = [
        b'{"batch": 0, "ordinal": 9, "output": "\\"ordinal\\": 12"}\n',
        b'{"batch": 0, "ordinal": 2, "attempt": 0}\n',
    ]
    again = [b'{"batch": 1, "ordinal": 10, "attempt": 0}\n', b'{"batch": 0, "ordinal": 3, "out']
    path.write_bytes(kept[0] + again[0] + kept[1] + again[1])
    SampleLog(path, next_ordinal=10)
    assert path.read_bytes() == b"".join(kept)
    assert [file.name for file in tmp_path.iterdir()] == ["samples.jsonl"]


def write_groups(log, ordinals):
    """One sample a group; lines of one length."""
    for ordinal in ordinals:
        group = Group(ordinal, 0, (make_sample(VERSION, ordinal=ordinal),))
        log.write(group, batch=0, fates=("trained",))


def ordinals_by_file(path):
    return {
        file.name: [json.loads(line)["ordinal"] for line in file.read_text().splitlines()]
        for file in dump_files(path)
    }


def test_full_files_are_numbered_and_the_oldest_goes_with_a_word(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_groups(SampleLog(path), [100])
    log = SampleLog(path, max_bytes=4 * 3 * path.stat().st_size)  # three lines a file
    (tmp_path / "samples.old.jsonl").touch()  # not one of them
    write_groups(log, range(100, 111))
    assert log.take_notices() == ()
    write_groups(log, range(111, 115))
    assert ordinals_by_file(path) == {
        "samples.2.jsonl": [103, 104, 105],
        "samples.3.jsonl": [106, 107, 108],
        "samples.4.jsonl": [109, 110, 111],
        "samples.jsonl": [112, 113, 114],
    }
    (told,) = log.take_notices()
    assert told == f"{tmp_path}/samples.1.jsonl was removed, so that --dump-max-gib is kept"
    assert log.take_notices() == ()
    SampleLog(path, next_ordinal=108)
    assert ordinals_by_file(path) == {
        "samples.2.jsonl": [103, 104, 105],
        "samples.3.jsonl": [106, 107],
        "samples.4.jsonl": [],
        "samples.jsonl": [],
    }


def test_a_full_disk_costs_samples_of_the_dump_and_is_told_once(tmp_path):
    path = tmp_path / "samples.jsonl"
    log = SampleLog(path)
    write_groups(log, [0, 2, 1])
    with no_file_beyond(path.stat().st_size + 9):
        write_groups(log, [3, 4])
    assert ordinals_by_file(path) == {"samples.jsonl": [0, 2, 1]}
    assert log.num_lost == 2
    (told,) = log.take_notices()
    assert told.startswith(f"{path} cannot be written (File too large): the run goes on, and count")
    with no_file_beyond(9):
        log = SampleLog(path, next_ordinal=2)
    (told,) = log.take_notices()
    assert told.startswith(f"{path} could not be cut back to what was trained (File too large): ")
    assert [file.name for file in tmp_path.iterdir()] == ["samples.jsonl"]
    assert ordinals_by_file(path) == {"samples.jsonl": [0, 2, 1]}
