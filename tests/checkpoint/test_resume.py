"""Where a command line begins: what is gone on from, what is refused, and what is said of it."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from async_grpo.checkpoint.folder import CheckpointFolder
from async_grpo.checkpoint.reader import Manifest
from async_grpo.checkpoint.resume import check_contents, find_start, hash_data
from async_grpo.config.train_config import TrainConfig
from async_grpo.model.model_folder import hash_model
from async_grpo.training.schedule import Clocks
from async_grpo.types import Question, TrainingPair
from async_grpo.util.errors import CheckpointError, ConfigError
from async_grpo.util.run_folder import METRICS_FILE, PARAMETERS_FILE

HASHES = {"model": "a" * 64, "tokenizer": "b" * 64, "data": "c" * 64}


def make_config(folder, **options):
    return TrainConfig(
        **{"model_name_or_path": "m", "data_path": "d", "output_dir": str(folder)} | options
    )


def make_run(config, *, checkpoints=(), steps=1, seconds=1.0):
    """What a run of `config` has left."""
    folder = Path(config.recording.output_dir)
    folder.mkdir(parents=True)
    (folder / METRICS_FILE).write_text(f'{{"total_seconds": {seconds}}}\n' * steps)
    (folder / PARAMETERS_FILE).write_text(json.dumps(config.options()))
    for batches in checkpoints:
        save(config, batches)
    return folder


def save(config, batches, **state):
    folder = CheckpointFolder(Path(config.recording.output_dir) / "checkpoints", keep=9)
    temporary = folder.begin(batches)
    (temporary / "shard.safetensors").write_bytes(b"0123456789")
    state = {"clocks": {"steps": batches, "samples": 8}, "references": [], "resume": None} | state
    manifest = Manifest(
        batches=batches,
        world_size=2,
        config=config.options(),
        hashes=HASHES,
        state=state,
    )
    return folder.commit(temporary, manifest)


def test_the_same_command_line_goes_on_from_the_newest_checkpoint(tmp_path):
    config = make_config(tmp_path / "run")
    make_run(config, checkpoints=(10, 20))
    start = find_start(config)
    assert (start.batches, start.clocks.steps, start.is_finished) == (20, 20, False)
    assert start.folder.name == "batch_20" and start.source == (tmp_path / "run").absolute()


def test_an_empty_folder_begins_at_the_first_question(tmp_path):
    start = find_start(make_config(tmp_path / "run"))
    assert (start.batches, start.folder, start.point) == (0, None, None)


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path, caplog):
    config = make_config(tmp_path / "run")
    folder = make_run(config, checkpoints=(10, 20))
    (folder / "checkpoints" / "batch_20" / "shard.safetensors").write_bytes(b"0123456780")
    with caplog.at_level(logging.WARNING):
        assert find_start(config).batches == 10
    (told,) = [record.getMessage() for record in caplog.records]
    assert "batch_20" in told and "passed over" in told and "shard.safetensors" in told


def test_a_run_without_one_good_checkpoint_is_never_silently_begun_again(tmp_path):
    config = make_config(tmp_path / "run")
    folder = make_run(config, checkpoints=(10,))
    (folder / "checkpoints" / "batch_10" / "shard.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be read .*shard.*--overw"):
        find_start(config)


def test_a_finished_run_says_how_to_go_on(tmp_path, caplog):
    config = make_config(tmp_path / "run", num_training_batches=20)
    make_run(config, checkpoints=(20,))
    with caplog.at_level(logging.INFO):
        assert find_start(config).is_finished
    assert "all 20 batches" in caplog.text and "larger --num-training-batches" in caplog.text
    assert not find_start(config.but(num_training_batches=21)).is_finished


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 16),
        ("train_minibatch_size", 16),
        ("samples_per_question", 4),
        ("infinite_sampler_seed", 38),
        ("max_staleness", 2),
        ("num_batches_per_ref_model_update", 7),
    ],
)
def test_options_that_define_the_order_must_be_the_same(tmp_path, name, value):
    config = make_config(tmp_path / "run")
    make_run(config, checkpoints=(10,))
    option = "--" + name.replace("_", "-")
    message = rf"{option} must be {config.options()[name]}, .*got {value}: give {option}"
    with pytest.raises(ConfigError, match=message):
        find_start(config.but(**{name: value}))


def test_other_options_may_change_and_are_listed_in_one_line(tmp_path, caplog):
    config = make_config(tmp_path / "run")
    make_run(config, checkpoints=(10,))
    with caplog.at_level(logging.INFO):
        find_start(config.but(learning_rate=3e-6, max_grad_norm=0.5))
    lines = [r.getMessage() for r in caplog.records if "differ" in r.getMessage()]
    assert len(lines) == 1
    assert "--learning-rate 1e-06 -> 3e-06, --max-grad-norm 1.0 -> 0.5" in lines[0]


def test_the_clock_of_tokens_goes_on_also_from_a_release_that_did_not_keep_it(tmp_path):
    kept = {"steps": 3, "samples": 24, "tokens": 700}
    old = {"steps": 3, "samples": 24}
    for name, clocks, tokens in (("new", kept, 700), ("old", old, 900)):
        config = make_config(tmp_path / name)
        make_run(config)
        save(config, 3, clocks=clocks, report={"tokens": 900})
        assert find_start(config).clocks == Clocks(3, 24, tokens)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path, caplog):
    config = make_config(tmp_path / "run")
    make_run(config, steps=99, seconds=29 * 60)  # one was due, and was still being written
    with caplog.at_level(logging.INFO):
        assert find_start(config.but(logging_level="DEBUG")).folder is None
    assert "starts again from its first batch" in caplog.text


@pytest.mark.parametrize(
    ("options", "steps", "minutes", "reason"),
    [
        ({"learning_rate": 2e-6}, 1, 1, "another --learning-rate"),
        ({}, 100, 1, "has left no checkpoint"),  # two were due, and one must be there
        ({}, 2, 30, "has left no checkpoint"),  # by minutes
        ({"checkpoint_every_batches": 0}, 1, 1, "has left no checkpoint"),
    ],
)
def test_another_run_without_a_checkpoint_is_not_lost(tmp_path, options, steps, minutes, reason):
    saved = {key: value for key, value in options.items() if key == "checkpoint_every_batches"}
    config = make_config(tmp_path / "run", **saved)
    make_run(config, steps=steps, seconds=60 * minutes)
    with pytest.raises(ConfigError, match=rf"holds a run already, and .*{reason}.*--overwrite"):
        find_start(make_config(tmp_path / "run", **options))


def test_never_refuses_a_run_and_overwrite_removes_it(tmp_path):
    config = make_config(tmp_path / "run")
    make_run(config, checkpoints=(10,))
    with pytest.raises(ConfigError, match="--resume never was given"):
        find_start(config.but(resume="never"))
    assert find_start(config.but(overwrite=True)).folder is None


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": "never"}])
def test_torchruns_restart_goes_on_whatever_the_first_start_was(tmp_path, monkeypatch, options):
    config = make_config(tmp_path / "run", **options)
    make_run(config, checkpoints=(10,))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find_start(config).batches == 10


def test_another_run_can_be_gone_on_from_in_a_new_folder_and_again(tmp_path):
    make_run(make_config(tmp_path / "old"), checkpoints=(10, 20))
    older = tmp_path / "old" / "checkpoints" / "batch_10"
    config = make_config(tmp_path / "new", resume=str(older))
    assert find_start(config).batches == 10
    assert find_start(config.but(resume=str(tmp_path / "old"))).batches == 20
    make_run(config)  # killed before its first checkpoint
    assert find_start(config).batches == 10
    save(config, 14)
    assert find_start(config).batches == 14, "the same command line goes on with its own run"
    with pytest.raises(ConfigError, match="not the run of --resume"):
        find_start(config.but(resume=str(tmp_path / "old")))


def test_going_back_within_a_run_takes_another_folder(tmp_path):
    config = make_config(tmp_path / "run")
    folder = make_run(config, checkpoints=(10, 20))
    back = config.but(resume=str(folder / "checkpoints" / "batch_10"))
    with pytest.raises(ConfigError, match=r"must be the newest .*another --output-dir"):
        find_start(back)
    with pytest.raises(ConfigError, match="--overwrite removes"):
        find_start(back.but(overwrite=True))


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_a_path_without_checkpoints_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--resume must be auto, never, or the folder"):
        find_start(make_config(tmp_path / "run", resume=path))


def test_a_moved_reference_that_was_not_saved_is_refused(tmp_path):
    options = {"num_batches_per_ref_model_update": 4, "max_staleness": 1}
    config = make_config(tmp_path / "run", **options)
    make_run(config, checkpoints=(10,))
    assert find_start(config).batches == 10
    with_kl = config.but(kl_coefficient=0.1)
    with pytest.raises(ConfigError, match="weights of the reference after batch 8"):
        find_start(with_kl)
    save(with_kl, 11, references=[8])
    assert find_start(with_kl).batches == 11


@pytest.mark.parametrize("name", HASHES)
def test_other_contents_are_refused_with_both_hashes(tmp_path, name):
    config = make_config(tmp_path / "run")
    make_run(config, checkpoints=(10,))
    start = find_start(config)
    paths = dict.fromkeys(HASHES, "/some/file")
    check_contents(start, HASHES, paths)
    with pytest.raises(CheckpointError) as error:
        check_contents(start, HASHES | {name: "f" * 64}, paths)
    for part in (f"the {name} of /some/file", HASHES[name], "f" * 64):
        assert part in str(error.value)


def question(**changes):
    fields = {"input_token_ids": np.array([1, 2]), "input": "a", "answer": "b", "columns": {"c": 1}}
    return Question(**fields | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"input_token_ids": np.array([1, 3])},
        {"input": "ab", "answer": ""},
        {"answer": None},
        {"columns": {"c": 2}},
        {"columns": {"c": 1, "d": None}},
    ],
)
def test_any_change_of_a_question_changes_the_hash_of_the_data(changes):
    assert hash_data([question()]) == hash_data([question()])
    assert hash_data([question(**changes)]) != hash_data([question()])


def test_the_order_and_the_border_of_records_change_the_hash():
    first, second = question(), question(answer="x")
    assert hash_data([first, second]) != hash_data([second, first])
    pairs = [TrainingPair(np.array(p), np.array(c)) for p, c in (([1], [2, 3]), ([1, 2], [3]))]
    assert hash_data(pairs[:1]) != hash_data(pairs[1:])


def test_the_model_is_its_config_and_its_weights_and_nothing_else(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = hash_model(str(tmp_path))
    (tmp_path / "README.md").write_text("hello")
    assert hash_model(str(tmp_path)) == first
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert hash_model(str(tmp_path)) != first


def test_a_new_run_takes_no_dump_that_lies_beside_its_folder(tmp_path, monkeypatch):
    dump = tmp_path / "elsewhere.jsonl"
    config = make_config(tmp_path / "run", dump_samples_filename=str(dump))
    find_start(config)
    dump.write_text("somebody's\n")
    with pytest.raises(ConfigError, match=f"--dump-samples-filename must name a new .*{dump}"):
        find_start(config)
    find_start(config.but(overwrite=True))
    make_run(config, checkpoints=(1,))
    assert find_start(config).batches == 1  # its own
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    find_start(config.but(output_dir=str(tmp_path / "other")))


def test_what_is_left_of_a_dump_in_the_folder_of_a_new_run_is_no_obstacle(tmp_path):
    (tmp_path / "samples.jsonl").write_text("{}\n")
    assert find_start(make_config(tmp_path)).folder is None
