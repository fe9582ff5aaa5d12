"""An export and its card reach a hub whole, and a hub that fails or hangs never hurts a run."""

import json
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants
from learners import make_learner
from oracle import tiny_model
from peft import LoraConfig, get_peft_model
from stand_in_hub import StandInHub
from test_hub import use
from test_loading import save_tokenizer
from transformers import AutoModelForCausalLM

from async_grpo.checkpoint.export import Exports
from async_grpo.cli.main import main
from async_grpo.model.hub import check_push, push_folder
from async_grpo.types import EndOfStep
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError
from async_grpo.util.waiting import poll

END = EndOfStep(0, 0, True, num_samples=6, num_tokens=9)
NAME = "my-team/my-model"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(tied=True).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def hub(monkeypatch):
    """A hub, for this process and those that it starts."""
    with StandInHub({}) as server:
        settings = {
            "HF_ENDPOINT": server.endpoint, "HF_TOKEN": "hf_right", "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        use(server.endpoint, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


@pytest.fixture
def exported(source, tmp_path):
    """Makes `Exports` that push, and have written one export."""

    def exported(**options):
        given = {"model_name_or_path": str(source), "push_to_hub": NAME}
        learner = make_learner(tmp_path / "run", **(given | options))
        exports = Exports(learner, doing=lambda words: None, sends=True)
        exports.count(END)
        exports.export()
        return exports

    return exported


def files_of(folder):
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def push(*words):
    return CliRunner().invoke(main, ["push", *map(str, words)], catch_exceptions=False)


def test_an_export_arrives_whole_in_one_private_commit(exported, hub, tmp_path, caplog):
    caplog.set_level("INFO", "async_grpo")
    exports = exported()
    assert not hub.pushed  # a checkpoint holds nothing of it yet
    exports.push(6)  # committed
    exports.push(6)  # by the next checkpoint, too
    exports.finish_pushes()
    export = tmp_path / "run" / "hf_format" / "samples_6"
    assert hub.pushed == {NAME: files_of(export)}
    assert (hub.commits[NAME], hub.private) == (1, {NAME})
    assert hub.tokens == {"Bearer hf_right"}
    assert f"sent {export}: {hub.endpoint}/{NAME}/commit/" in caplog.text


def test_the_newest_export_is_sent_at_the_end_without_a_checkpoint(exported, hub, tmp_path):
    exports = exported(hub_public=True)
    exports.finish_pushes()
    assert hub.pushed[NAME].keys() == files_of(tmp_path / "run" / "hf_format" / "samples_6").keys()
    assert not hub.private


def test_a_hub_that_fails_costs_the_push_alone_and_push_tries_again(
    exported, hub, tmp_path, caplog
):
    exports = exported()
    hub.broken = 403
    exports.finish_pushes()
    (told,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    export = tmp_path / "run" / "hf_format" / "samples_6"
    assert told.startswith(
        f"{export} was NOT sent to the hub, which costs the run nothing: {export}"
    )
    assert "set HF_TOKEN to one that may write there" in told
    assert told.endswith(f"`async-grpo push {export} {NAME}` tries again")
    failed = push(tmp_path / "run", NAME)
    assert (failed.exit_code, failed.stderr.count("\n")) == (1, 1)
    hub.broken = 0
    result = push(tmp_path / "run", NAME)
    assert result.exit_code == 0 and result.stdout.startswith(f"sent {export}: {hub.endpoint}")
    assert hub.pushed == {NAME: files_of(export)}


def test_a_hub_that_hangs_is_given_up_and_holds_up_nothing(exported, hub, monkeypatch, caplog):
    monkeypatch.setattr(deadlines, "HUB_PUSH_S", 2.0)
    exports = exported()
    hub.silent.set()
    begun = time.monotonic()
    exports.push(6)
    exports.count(END)
    exports.export()
    assert time.monotonic() - begun < 2
    exports.finish_pushes()
    assert time.monotonic() - begun < 10
    assert "was not there in 2 s" in caplog.text


def test_while_one_is_sent_the_newest_of_the_others_waits(exported, hub, tmp_path):
    exports = exported()
    hub.silent.set()
    exports.push(6)
    for _ in poll(every_s=0.05, within_s=30):
        if hub.tokens:  # the first is on its way
            break
    for number in (12, 18):
        shutil.copytree(
            exports_of(tmp_path) / "samples_6", exports_of(tmp_path) / f"samples_{number}"
        )
        (exports_of(tmp_path) / f"samples_{number}" / "README.md").write_text(str(number))
        exports.push(number)
    hub.silent.clear()
    hub._spoken.set()
    exports.push(18)
    exports._pushes.wait()
    assert hub.commits[NAME] == 2
    assert hub.pushed[NAME]["README.md"] == b"18"


def exports_of(tmp_path):
    return tmp_path / "run" / "hf_format"


def test_weights_that_a_commit_has_not_any_more_are_removed(source, hub):
    push_folder(source, NAME, public=False)
    hub.pushed[NAME]["model-00001-of-00002.safetensors"] = b"old"
    hub.pushed[NAME]["figure.png"] = b"mine"
    push_folder(source, NAME, public=False)
    assert hub.pushed[NAME].keys() == {*files_of(source), "figure.png"}


def test_an_adapter_is_sent_as_it_is(source, hub, tmp_path):
    adapter = tmp_path / "adapter"
    get_peft_model(tiny_model(tied=True), LoraConfig()).save_pretrained(adapter)
    files = files_of(adapter)
    (adapter / "merged").mkdir()
    (adapter / "merged" / "model.safetensors").write_text("mine")
    result = push(adapter, NAME)
    assert result.exit_code == 0, result.output
    assert hub.pushed == {NAME: files}


def test_a_model_that_is_public_is_not_pushed_to_unless_that_is_said(source, hub):
    push_folder(source, NAME, public=True)
    with pytest.raises(ConfigError, match=f"{NAME} is there on .* and public: add --hub-public"):
        push_folder(source, NAME, public=False)
    assert hub.commits[NAME] == 1


REFUSED = {
    "no token": ({"HF_TOKEN": ""}, NAME, "needs a token that may write: set HF_TOKEN"),
    "shape": ({}, "a/b/c", "must be NAME or ORGANISATION/NAME, .* got 'a/b/c': correct it"),
    "offline": ({"offline": True}, NAME, "HF_HUB_OFFLINE is set: unset it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sent_is_refused_before_a_run_begins(case, hub, monkeypatch, tmp_path):
    changes, name, sentence = REFUSED[case]
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for variable in {"HF_TOKEN"} & changes.keys():
        monkeypatch.setenv(variable, changes[variable])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", changes.get("offline", False))
    with pytest.raises(ConfigError, match=sentence):
        check_push(name)
    assert not hub.tokens  # nobody was asked


def test_a_card_says_what_made_the_model_and_no_place_of_this_machine(exported, hub, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = {"step": 8, "avg_reward": 0.51234, "loss": None, "seconds": 3.0}
    (run / "training_metrics.jsonl").write_text(json.dumps(rows) + "\n")
    (run / "evaluation_metrics.jsonl").write_text(
        '{"set": "", "batch": 4, "eval_accuracy": 0.75}\n'
    )
    exported(data_path=str(tmp_path / "questions.jsonl"), learning_rate=2e-6)
    folder = run / "hf_format" / "samples_6"
    card = (folder / "README.md").read_text()
    for part in (
        "# tiny, trained on questions.jsonl", "By `grpo` on 6 samples", "| learning_rate | 2e-06 |",
        "| avg_reward | 0.5123 |", "| eval_accuracy | 0.75 |", "| async-grpo | 0.1.0 |",
        "| torch |", "library_name: transformers",
    ):  # fmt: skip
        assert part in card
    assert str(tmp_path) not in card and "seconds" not in card and "hf_right" not in card
    assert AutoModelForCausalLM.from_pretrained(folder)


def test_a_card_names_a_base_of_the_hub_by_its_name(exported, source, tmp_path):
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "0123"
    shutil.copytree(source, snapshot)
    exported(model_name_or_path=str(snapshot), data_path="openai/gsm8k")
    card = (exports_of(tmp_path) / "samples_6" / "README.md").read_text()
    assert card.startswith("---\nbase_model: Qwen/Qwen3-8B\nlibrary_name")
    assert "# Qwen/Qwen3-8B, trained on openai/gsm8k\n" in card
