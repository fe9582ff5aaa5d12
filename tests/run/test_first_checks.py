"""What a trainer says before it imports torch, each mistake tried in the same fresh process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.cli.train import check_at_once
from async_grpo.config.train_config import TrainConfig
from async_grpo.util.errors import ConfigError, UnfitModel

REPOSITORY = Path(__file__).parents[2]
MODEL = str(REPOSITORY / "sample-data" / "tiny-countdown")
TRY_ALL = """
import json, logging, sys
from async_grpo.cli import train
from async_grpo.config.train_config import TrainConfig
from async_grpo.util.errors import AsyncGrpoError

def heavy():
    return sorted({"torch", "transformers", "accelerate", "datasets"} & set(sys.modules))

class Seen(logging.Handler):
    def emit(self, record):
        said.append((record.getMessage(), heavy()))

logging.getLogger("async_grpo").setLevel("INFO")
logging.getLogger("async_grpo").addHandler(Seen())
answers = {}
for name, options in json.loads(sys.argv[1]).items():
    said = []
    try:
        train.run(TrainConfig(**options))
    except AsyncGrpoError as error:
        answers[name] = {"first": said[0], "error": (str(error), heavy())}
print(json.dumps(answers))
"""
MISTAKES = {
    "output": ({"output_dir": "{file}"}, "--output-dir must lie in a folder that can be written, "),
    "tracker": ({"trackers": "foo"}, "--trackers must be among aim, "),
    "missing tracker": ({"trackers": "wandb"}, "--trackers wandb needs a package that is not ins"),
    "model": ({"model_name_or_path": "/no/model"}, "the model must be a Hugging Face folder on"),
    "weights": (
        {"model_name_or_path": "{model}"},
        "{model}/model.safetensors must be a whole safetensors file, but: ",
    ),
    "data": ({"data_path": "/no.jsonl"}, "--data-path must be an existing file or folder, got"),
    "evaluation": ({"eval_data_path": "/no.jsonl"}, "--eval-data-path must be an existing file "),
    "pairs": ({"pairs_path": "/no.jsonl"}, "--pairs-path must be an existing file or folder, got"),
    "ending": ({"eval_data_path": "{xml}"}, "--eval-data-path must end in one of .jsonl, .json, "),
    "first line": ({"eval_data_path": "{bad}"}, "{bad} line 1, expected a JSON object, got 'x'"),
    "mapping": ({"column_mapping": "input"}, "--column-mapping must hold our=yours pairs, got"),
    "column": (
        {"column_mapping": "input=question"},
        "{file} line 1, column 'question': expected what --column-mapping names, got only columns",
    ),
    "address": ({"ray_address": "127.0.0.1"}, "--ray-address (or RAY_ADDRESS) must be host:port"),
    "no head": ({"ray_address": "127.0.0.1:1"}, "no Ray cluster answers at 127.0.0.1:1 (Connec"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    files = {name: folder / f"{name}.jsonl" for name in ("file", "bad")}
    files["file"].write_text('{"input": "1+1="}\n')
    files["bad"].write_text("x")
    files["xml"] = folder / "questions.xml"
    files["xml"].touch()
    files["model"] = folder / "model"
    files["model"].mkdir()
    (files["model"] / "config.json").write_text("{}")
    (files["model"] / "model.safetensors").touch()
    return {name: str(file) for name, file in files.items()}


@pytest.fixture(scope="module")
def answers(places):
    """By mistake: the first line of the log and the error, each with what was imported by then."""
    usual = {"model_name_or_path": MODEL, "data_path": places["file"], "ray_address": "127.0.0.1:1"}
    tried = {
        name: usual | {option: value.format(**places) for option, value in wrong.items()}
        for name, (wrong, _) in MISTAKES.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", TRY_ALL, json.dumps(tried)],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_needs_no_torch_is_checked_before_it_is_imported(mistake, answers, places):
    error, imported = answers[mistake]["error"]
    assert error.startswith(MISTAKES[mistake][1].format(**places))
    assert imported == []


def test_the_first_line_comes_before_torch(answers):
    line, imported = answers["no head"]["first"]
    said, _, threads = line.partition("; ")
    assert said == "async-grpo 0.1.0: loading, to train in runs/latest"
    assert re.fullmatch(r"\d+ thread\(s\) a rank on \d+ core\(s\)", threads)
    assert imported == []


def check(tmp_path, **options):
    options = {"output_dir": str(tmp_path / "run"), "trackers": ""} | options
    check_at_once(TrainConfig(model_name_or_path="/no/model", data_path="d", **options))


def test_folders_that_can_be_made_are_no_obstacle(tmp_path):
    with pytest.raises(UnfitModel, match="'/no/model' is neither"):
        check(tmp_path, dump_samples_filename=str(tmp_path / "new" / "dump.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_a_place_below_a_file_or_a_folder_as_dump_is_named_by_its_option(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    with pytest.raises(ConfigError, match=rf"--output-dir must lie in a folder .*, {file} cannot"):
        check(tmp_path, output_dir=str(file / "run"))
    with pytest.raises(ConfigError, match=rf"--dump-samples-filename must lie in .*, {file} can"):
        check(tmp_path, dump_samples_filename=str(file / "dump.jsonl"))
    with pytest.raises(ConfigError, match=f"--dump-samples-filename must not be .*{folder}"):
        check(tmp_path, dump_samples_filename=str(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"--dump-samples-filename must lie in .*locked cannot"):
        check(tmp_path, dump_samples_filename=str(tmp_path / "locked" / "dump.jsonl"))
