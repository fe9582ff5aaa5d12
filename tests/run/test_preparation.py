"""What a resumed run must find as its checkpoint left it, and what a slot of it is."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from model_families import family_config
from oracle import tiny_model
from peft import LoraConfig, get_peft_model
from scripted_run import make_config

from async_grpo.checkpoint.resume import Start
from async_grpo.model.model_folder import check_model_folder
from async_grpo.run import preparation
from async_grpo.run.data import load_data, load_given
from async_grpo.run.preparation import hash_code, hash_contents, plan_run
from async_grpo.util.errors import CheckpointError, DataError


@pytest.mark.parametrize("what", ["algorithm", "environment"])
def test_a_file_of_the_user_s_that_was_edited_is_refused_naming_it_and_both_hashes(
    what, tmp_path, monkeypatch
):
    monkeypatch.setattr(preparation, "hash_model", lambda path: "of the model")
    facts = SimpleNamespace(tokenizer_hash="of the tokenizer")
    path = tmp_path / "mine.py"
    config = make_config(**{what: f"{path}:Mine"})

    def hashes(text, saved=None):
        path.write_text(text)
        manifest = SimpleNamespace(hashes=saved)
        start = Start(tmp_path / "checkpoint", manifest) if saved else Start()
        return hash_contents(config, facts, (), start=start).result()

    saved = hashes("1")
    assert hashes("1", saved) == saved
    edited = hashes("2")[what]
    said = f"the {what} of {path}:Mine must be .*{saved[what]}, got {edited}: give the same one"
    with pytest.raises(CheckpointError, match=said):
        hashes("2", saved)


def test_a_run_that_began_with_another_adapter_is_refused_to_go_on(tmp_path):
    adapter = tmp_path / "adapter"
    get_peft_model(tiny_model(tied=True), LoraConfig()).save_pretrained(adapter)
    tiny_model(tied=True).save_pretrained(tmp_path / "model")
    config = make_config(model_name_or_path=str(tmp_path / "model"), adapter_path=str(adapter))
    facts = SimpleNamespace(tokenizer_hash="of the tokenizer")

    def hashes(saved=None):
        manifest = SimpleNamespace(hashes=saved)
        start = Start(tmp_path / "checkpoint", manifest) if saved else Start()
        return hash_contents(config, facts, (), start=start).result()

    saved = hashes()
    assert hashes(saved) == saved
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        before = (adapter / file).read_bytes()
        (adapter / file).write_bytes(before + b" ")
        with pytest.raises(CheckpointError, match=f"the adapter of {adapter} must be what"):
            hashes(saved)
        (adapter / file).write_bytes(before)
    assert hashes(saved) == saved


def test_every_file_that_decides_what_is_trained_is_hashed(tmp_path):
    (tmp_path / "mine.py").write_text("import helper")
    (tmp_path / "helper.py").write_text("")
    mine = f"{tmp_path}/mine.py:Mine"
    config = make_config(environment=mine, eval=f"held=h.jsonl,environment={mine}")
    rewards = SimpleNamespace(hashes={"own.py": "1", "helper.py of own.py": "2"})
    served = SimpleNamespace(rewards=None, code={"service index": "3"})
    workers = (served, SimpleNamespace(rewards=rewards, code={}))
    found = hash_code(config, workers)
    assert found.keys() == {
        "environment", "helper.py of environment",
        "environment of --eval held", "helper.py of environment of --eval held",
        "reward own.py", "reward helper.py of own.py", "service index",
    }  # fmt: skip
    assert found["reward own.py"] == "1"
    played = make_config(environment=f"agent:python {tmp_path}/mine.py --once")
    assert hash_code(played).keys() == {"environment", "helper.py of environment"}
    for name in ("verifiers:gsm8k", "single_turn"):
        assert hash_code(make_config(environment=name)).keys() <= {"environment"}


MODEL = str(Path(__file__).parents[2] / "sample-data" / "tiny-countdown")


@pytest.fixture
def files(tmp_path):
    """Questions, and pairs of which one has a type."""
    questions = [{"input": f"use {n} 2 to make 3\n"} for n in range(1, 6)]
    pairs = [
        {"input": f"use 1 {n} to make {1 + n}\n", "completion": f"1+{n}={1 + n}"}
        for n in range(1, 8)
    ]
    pairs[2]["dataset_type"] = "sums"
    for name, lines in (("questions", questions), ("pairs", pairs)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def mixed_config(files, **changes):
    return make_config(
        model_name_or_path=MODEL,
        data_path=str(files / "questions.jsonl"),
        pairs_path=str(files / "pairs.jsonl"),
        output_dir=str(files / "run"),
        **{"gkd_lambda": 0.5, "gkd_coefficient": 1.0, "teacher_for": "big"} | changes,
    )


def test_every_other_slot_of_a_run_with_lambda_one_half_is_of_given_pairs(files):
    config = mixed_config(files)
    facts = check_model_folder(MODEL)
    pairs = load_given(config, facts)
    plan = plan_run(config, facts, *load_data(config, facts), pairs=pairs, num_ranks=1)
    slots = [plan.given(ordinal) for ordinal in range(14)]
    assert [len(slot) for slot in slots] == [3, 0] * 7
    epoch = [pair.completion for slot in slots for pair in slot][:7]
    assert sorted(epoch) == [f"1+{n}={1 + n}" for n in range(1, 8)]
    asked = [plan.draw(ordinal, attempt=0)[0].input for ordinal in range(1, 10, 2)]
    assert sorted(asked) == [f"use {n} 2 to make 3\n" for n in range(1, 6)]
    kinds = [pair.question.columns.get("dataset_type") for pair in pairs]
    assert kinds == [None, None, "sums", None, None, None, None]


def test_beginnings_are_packed_once_where_every_layer_only_attends_by_our_own_kernel(files):
    facts, states = check_model_folder(MODEL), files / "states"
    family_config("lfm2").save_pretrained(states)

    def shares(model=MODEL, **changes):
        config = mixed_config(files, **changes).but(model_name_or_path=model)
        tables = load_data(mixed_config(files), facts)
        return plan_run(config, facts, *tables, num_ranks=1).shares_prefixes

    assert shares()
    assert not shares(attention="flash_attention_2")
    assert not shares(model=str(states))


def test_a_pair_that_does_not_fit_is_refused_with_its_line_before_anything_is_made(files):
    with (files / "pairs.jsonl").open("a") as file:
        file.write(json.dumps({"input": "use 1 2 to make 3\n", "completion": "1+2=3" * 9}) + "\n")
    config = mixed_config(files, max_tokens_per_gpu=40)
    said = r"pairs.jsonl line 8, column 'input': expected a pair of at most 40 tokens .*, got 64"
    with pytest.raises(DataError, match=said):
        load_given(config, check_model_folder(MODEL))


def test_a_resumed_run_with_other_pairs_is_refused(files, monkeypatch):
    monkeypatch.setattr(preparation, "hash_model", lambda path: "of the model")
    config, facts = mixed_config(files), check_model_folder(MODEL)

    def hashes(saved=None):
        manifest = SimpleNamespace(hashes=saved)
        start = Start(files / "checkpoint", manifest) if saved else Start()
        return hash_contents(
            config, facts, (), pairs=load_given(config, facts), start=start
        ).result()

    saved = hashes()
    assert hashes(saved) == saved and "pairs" in saved
    with (files / "pairs.jsonl").open("a") as file:
        file.write(json.dumps({"input": "use 1 2 to make 3\n", "completion": "1+2=3"}) + "\n")
    with pytest.raises(CheckpointError, match=r"the pairs of .*pairs.jsonl must be what"):
        hashes(saved)
