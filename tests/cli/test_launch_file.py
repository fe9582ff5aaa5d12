"""A run of one machine from one file: what is started, what ends it, and with which code."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from async_grpo.cli import launch_file, run_processes
from async_grpo.cli.assignment import Node
from async_grpo.cli.launch_file import _file_kept, launch
from async_grpo.cli.local_run import options_of_run, planned
from async_grpo.cli.main import quickstart
from async_grpo.cli.train import config_of, resolved
from async_grpo.cli.train import main as train
from async_grpo.cli.worker import main as worker
from async_grpo.config.option import option_fields
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.run.output_folder import check_overwrite

REPOSITORY = Path(__file__).parents[2]
FILE = """
[launch]
ray_address = "elsewhere:1"

[[worker]]
model_path = "m"
enable_prefix_caching = false

[[worker]]
model_path = "m"
mode = "logprob"
num_workers = 3

[train]
model_name_or_path = "m"
data_path = "d"
output_dir = "{folder}/run"
learning_rate = 1e-5
deterministic = true
max_staleness = 0
"""
HOLDER = """
import sys, time
from pathlib import Path
from async_grpo.run.output_folder import lock
file = lock(Path(sys.argv[1]))
print(flush=True)
time.sleep(60)
"""
# In the place of `async-grpo`: workers wait to be interrupted, the trainer does what a test wants.
COMMAND = """
import os, signal, sys, time
command, *options = sys.argv[1:]
def note(word):
    with open("notes", "a") as file:
        file.write(f"{word} {os.getpid()} {' '.join(options)}\\n")
def stopped(*_):
    note(f"{command} stopped")
    sys.exit(130)
signal.signal(signal.SIGINT, stopped)
if command == "check":  # beside the start: it finds nothing
    sys.exit()
if command == "control":  # of a trainer that asks for a file, or of none
    open("stop", "w").close()
    sys.exit(not os.path.exists("is_controlled"))
note(command)
if command == "train":
    exec(open("trainer.py").read())
elif command == "worker" and not os.path.exists("no_workers"):
    time.sleep(600)
while "train" not in open("notes").read():  # so that there is a trainer to be ended
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def _unbroken(monkeypatch):
    """What check would find of runs whose model is none: tests/check looks at that."""
    monkeypatch.setattr(run_processes, "refuse_broken", lambda *_, **__: None)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(FILE.format(folder=tmp_path))
    return str(path)


def plan(*arguments):
    options = launch.make_context("launch", list(arguments)).params
    return planned(**options_of_run(options))


def test_each_table_becomes_a_config(file, tmp_path):
    run = plan(file)
    assert run.workers == (
        WorkerConfig(model_path="m", enable_prefix_caching=False),
        WorkerConfig(model_path="m", mode="logprob", num_workers=3),
    )
    assert run.train == TrainConfig(
        model_name_or_path="m", data_path="d", output_dir=f"{tmp_path}/run", learning_rate=1e-5,
        deterministic=True, max_staleness=0,
    )  # fmt: skip
    assert (run.ray_address, run.plot) == ("elsewhere:1", {})


def test_a_dispatcher_elsewhere_gets_the_shell_s_variables_of_libraries_and_shows_none(
    file, monkeypatch
):
    given = {
        "NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", "UCX_NET_DEVICES": "mlx5_0:1",
        "VLLM_LOGGING_LEVEL": "DEBUG", "HF_HOME": "/models", "HF_TOKEN": "hf_secret",
        "TRITON_CACHE_DIR": "/tmp/triton",
    }  # fmt: skip
    for name, value in (given | {"VLLM_HOST_IP": "10.0.0.1", "RAY_AUTH_TOKEN": "ray"}).items():
        monkeypatch.setenv(name, value)
    node = Node("n", "b", 0, 1.0)
    process = run_processes.remote_dispatcher_of(plan(file), 1, name="logprob", node=node)
    environment = process.process.environment
    assert environment.items() >= given.items()
    assert environment["RAY_ADDRESS"] == "elsewhere:1"
    assert not {"VLLM_HOST_IP", "RAY_AUTH_TOKEN", "PATH"} & environment.keys()
    assert "hf_secret" not in repr(process) + " ".join(process.process.command)


def test_ray_counts_a_cpu_for_each_worker_at_least(file):
    assert plan(file, "--num-cpus", "2").num_cpus == 4
    assert plan(file, "--num-cpus=9").num_cpus == 9


def test_options_behind_the_file_go_before_those_in_it(file):
    run = plan(file, "--num-training-batches", "3", "--no-deterministic", "--ray-address", "x:2")
    assert (run.train.batching.num_training_batches, run.train.batching.deterministic) == (3, False)
    assert run.ray_address == "x:2"


@pytest.mark.parametrize(
    ("typed", "change", "sentence"),
    [
        (("--learning-rat", "1"), "", "No such option '--learning-rat'"),
        ((), "[plot]\nvariables = []\n", "[plot] variables is no option of `async-grpo plot`"),
        ((), "[[worker]]\nmodel_path = 'm'\nnum_workers = 0\n", "--num-workers must be at least"),
        ((), "batch_size = 0\n", "--batch-size must be positive"),
        (("--environment", "none.py:Mine"), "", "--environment must be single_turn, agent:"),
        (("--gkd-alpha", "1.5"), "gkd_coefficient = 1\nteacher_for = ['x']\n", "must be in [0, 1]"),
        (
            ("--ray-address", ""),
            "gkd_coefficient = 1\nteacher_for = ['x']\n",
            "needs a [[worker]] for the role teacher:x (--teacher-for x): add one",
        ),
    ],
)  # fmt: skip
def test_what_a_command_would_refuse_is_refused_before_anything_starts(
    typed, change, sentence, file, tmp_path
):
    with open(file, "a") as run:
        run.write(change)
    result = CliRunner().invoke(launch, [file, *typed])
    assert result.exit_code != 0 and sentence in result.stderr
    assert not (tmp_path / "run").exists()


def test_the_quick_start_s_file_is_a_run(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    run = plan("examples/quickstart.toml")
    assert [config.mode for config in run.workers] == ["generation", "logprob"]
    [command] = run.prepare
    assert run.train.data.data_path in command and run.train.evaluation.eval_data_path in command
    assert run.plot["output"] == f"{run.folder}/reward.svg"


EXAMPLES = [
    str(path.relative_to(REPOSITORY))
    for path in sorted(REPOSITORY.glob("examples/**/*.toml"))
    if path.name != "pyproject.toml"
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_run_on_what_it_prepares(example, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    run = plan(example)
    words = [word for command in run.prepare for word in command]
    assert bool(run.workers) is not run.learns_from_pairs and run.folder.parts[0] == "runs"
    paths = [Path(file.source.path) for file in run.train.data.data_files]
    assert all({str(path), str(path.parent)} & set(words) for path in paths)


@pytest.fixture
def finished(tmp_path):
    """The folder of `file`'s run, which has trained all of its batches."""
    folder = tmp_path / "run"
    for name in ("checkpoints/batch_4", "checkpoints/batch_7", "hf_format/samples_9"):
        (folder / name).mkdir(parents=True)
    for number in (4, 7):
        (folder / "checkpoints" / f"batch_{number}" / "COMMITTED").touch()
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def nothing_starts(monkeypatch):
    for name in ("_finish", "_train"):
        monkeypatch.setattr(launch_file, name, lambda *_: pytest.fail("something was started"))
    monkeypatch.setattr(launch_file, "interrupt_once", lambda: None)


def test_a_line_in_a_file_removes_no_run_that_has_a_checkpoint(file, finished, monkeypatch):
    nothing_starts(monkeypatch)
    with open(file, "a") as run:
        run.write("overwrite = true\n")
    before = contents(finished)
    result = CliRunner().invoke(launch, [file])
    assert result.exit_code == 1 and contents(finished) == before
    assert (
        f"--overwrite must be typed to remove a run with a checkpoint, got {finished}/checkpoints/"
        "batch_7, and a file that says it: type --no-overwrite to go on after batch 7, or type "
        "--overwrite to remove the run"
    ) in result.stderr


def test_overwrite_that_is_typed_holds_and_so_does_one_of_a_file_without_a_checkpoint(
    file, finished, monkeypatch
):
    trained = []
    monkeypatch.setattr(launch_file, "interrupt_once", lambda: None)
    monkeypatch.setattr(launch_file, "_train", trained.append)
    assert CliRunner().invoke(launch, [file, "--overwrite"]).exit_code == 0
    shutil.rmtree(finished / "checkpoints")
    with open(file, "a") as run:
        run.write("overwrite = true\n")
    assert CliRunner().invoke(launch, [file]).exit_code == 0
    assert [run.train.recording.overwrite for run in trained] == [True, True]
    assert all("--overwrite" in run.train_words for run in trained)


def test_no_example_removes_a_run():
    for example in EXAMPLES:
        assert not re.search(r"overwrite", (REPOSITORY / example).read_text()), example


def test_a_run_that_is_finished_is_said_to_be_before_anything_starts(file, finished, monkeypatch):
    nothing_starts(monkeypatch)
    before = contents(finished)
    result = CliRunner().invoke(launch, [file, "--num-training-batches", "7"])
    assert (result.exit_code, contents(finished)) == (0, before)
    assert result.stdout.startswith(f"{finished} is finished: all of its 7 batches are trained")
    assert f"`async-grpo launch {finished}/run.toml --num-training-batches 14`" in result.stdout


def test_a_finished_run_goes_on_for_longer(file, finished, monkeypatch):
    trained = []
    monkeypatch.setattr(launch_file, "interrupt_once", lambda: None)
    monkeypatch.setattr(launch_file, "_train", trained.append)
    assert CliRunner().invoke(launch, [file, "--num-training-batches", "14"]).exit_code == 0
    assert [run.train.batching.num_training_batches for run in trained] == [14]


def test_a_second_launch_into_a_folder_in_use_touches_nothing_of_the_first(
    file, tmp_path, monkeypatch
):
    nothing_starts(monkeypatch)
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "trainer.log").write_text("of the first")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE
    ) as first:
        first.stdout.readline()
        before = contents(tmp_path / "run")
        result = CliRunner().invoke(launch, [file, "--prepare", "python make.py", "--trust"])
        assert result.exit_code == 1 and f"in use by another trainer (process {first.pid} on" in (
            result.stderr
        )
        assert contents(tmp_path / "run") == before
        first.kill()


def test_only_a_folder_that_a_launch_makes_is_its_user_s_alone(file, tmp_path, monkeypatch):
    monkeypatch.setattr(launch_file, "interrupt_once", lambda: None)
    monkeypatch.setattr(launch_file, "_train", lambda _: None)
    assert CliRunner().invoke(launch, [file]).exit_code == 0
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    (tmp_path / "run").chmod(0o750)
    assert CliRunner().invoke(launch, [file]).exit_code == 0
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o750


def test_a_run_s_folder_keeps_the_very_file_that_was_launched(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first = CliRunner().invoke(launch, ["examples/laptop.toml", "--dry-run"]).stdout
    run = plan("examples/laptop.toml")
    run.folder.mkdir(parents=True)
    with _file_kept(run):
        (run.folder / "training_params.json").touch()
    again = CliRunner().invoke(launch, ["runs/laptop/run.toml", "--dry-run"]).stdout
    assert first == again and 'output_dir = "runs/laptop"' in first


def test_the_commands_of_a_dry_run_read_its_text(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = CliRunner().invoke(launch, ["examples/laptop.toml", "--dry-run"]).stdout
    [place] = re.findall(r"(?m)^# They read this text as (\S+),", text)
    Path(place).parent.mkdir(parents=True)
    Path(place).write_text(text)
    run = plan("examples/laptop.toml")
    own = [line.split()[2:] for line in text.splitlines() if line.startswith("#     async-grpo ")]
    serving = [words[1:] for words in own if words[0] == "worker"]
    [training] = [words[1:] for words in own if words[0] == "train"]
    for words, config in zip(serving, run.workers, strict=True):
        read = worker.make_context("worker", words).params
        assert WorkerConfig(**{name: read[name] for name in option_fields(WorkerConfig)}) == config
    assert config_of(train.make_context("train", training)) == run.train


def test_environment_and_agent_train_the_same_model_on_the_same_questions(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    files = ("examples/countdown_tool.toml", "examples/black_box_agent/run.toml")
    runs = [plan(file) for file in files]
    assert {run.train.places.model_name_or_path for run in runs} == {"sample-data/tiny-chat"}
    made = []
    for run in runs:
        [command] = run.prepare
        assert run.train.data.data_path in command
        made.append([word.replace(run.train.recording.output_dir, "OUTPUT") for word in command])
    assert made[0] == made[1]


def test_several_commands_prepare_a_run_one_after_the_other(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    run = plan("examples/quickstart.toml", "--prepare", "python a.py --x 1 && async-grpo generate")
    assert run.prepare == (("python", "a.py", "--x", "1"), ("async-grpo", "generate"))


def test_a_program_that_is_not_there_is_named_before_anything_starts(file, tmp_path):
    result = CliRunner().invoke(launch, [file, "--prepare", "/no/python make.py", "--trust"])
    assert (result.exit_code, (tmp_path / "run" / "logs" / "ray.log").exists()) == (1, False)
    assert "prepare must name a program that is there" in result.stderr
    assert "/no/python" in result.stderr


def test_options_of_the_quick_start_reach_the_data_and_the_trainer(monkeypatch, tmp_path):
    runs = []
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("async_grpo.cli.main.run_here", runs.append)
    folder = tmp_path / "first"
    typed = f"--num-batches 7 --seed 5 --num-ranks 1 --max-staleness 0 --output-dir {folder}"
    assert CliRunner().invoke(quickstart, typed.split(), catch_exceptions=False).exit_code == 0
    [run] = runs
    [command] = run.prepare
    assert command[-3:] == (
        "--seed=5", f"--output={folder}/questions.jsonl",
        f"--held-out-output={folder}/held_out.jsonl",
    )  # fmt: skip
    assert (run.train.batching.num_training_batches, run.train.sampling.max_staleness) == (7, 0)
    assert (run.train.data.infinite_sampler_seed, run.folder) == (5, folder)
    assert run.train.data.data_path == f"{folder}/questions.jsonl"
    assert run.num_ranks == 1


def test_the_quick_start_replaces_no_folder_that_is_not_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    result = CliRunner().invoke(quickstart, ["--output-dir", str(tmp_path)])
    assert result.exit_code == 1 and "exists and is not a quick start's" in result.stderr


@pytest.mark.parametrize(
    ("changed", "is_own"),
    [
        ({}, True),
        ({"num_training_batches": 7, "infinite_sampler_seed": 3, "max_staleness": 0}, True),
        ({"learning_rate": 0.5}, False),
        ({"data_path": "mine.jsonl"}, False),
    ],
)
def test_the_quick_start_run_twice_replaces_what_a_quick_start_has_made(
    changed, is_own, monkeypatch, tmp_path
):
    monkeypatch.chdir(REPOSITORY)
    runs, folder = [], tmp_path / "first"
    monkeypatch.setattr("async_grpo.cli.main.run_here", runs.append)
    again = ["--output-dir", str(folder)]
    assert CliRunner().invoke(quickstart, again, catch_exceptions=False).exit_code == 0
    (folder / "checkpoints" / "batch_9").mkdir(parents=True)
    (folder / "checkpoints" / "batch_9" / "COMMITTED").touch()
    (folder / "logs").mkdir()
    saved = resolved(runs[0].train).options() | changed
    (folder / "training_params.json").write_text(json.dumps(saved))
    result = CliRunner().invoke(quickstart, again)
    assert (result.exit_code, len(runs)) == ((0, 2) if is_own else (1, 1))
    assert is_own or "exists and is not a quick start's" in result.stderr
    check_overwrite(runs[-1].train.recording, is_typed=runs[-1].types_overwrite)


@pytest.fixture
def started(file, tmp_path):
    """Starts `async-grpo launch` with a stand-in for the commands that it starts itself."""
    (tmp_path / "command.py").write_text(COMMAND)
    code = (
        "import sys; from async_grpo.cli import launch_file, run_processes\n"
        "run_processes.COMMAND = (sys.executable, 'command.py')\n"
        "run_processes.refuse_broken = lambda *_, **__: None\n"  # see `_unbroken`
        "launch_file._nodes = lambda run: (launch_file.HERE,)\n"  # no cluster is there
        "launch_file.launch(prog_name='launch')"
    )

    def start(trainer):
        (tmp_path / "trainer.py").write_text(trainer)
        return subprocess.Popen(
            [sys.executable, "-c", code, file],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def notes(folder):
    """{word: process} of what the commands have noted."""
    path = folder / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[:2] if "stopped" not in line else line.split()[:3] for line in lines]


def has_ended(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.integration
@pytest.mark.parametrize(
    ("trainer", "code", "said"),
    [
        ("time.sleep(1)", 0, ""),
        ("sys.exit('error: no luck')", 1, "the trainer failed with exit code 1: no luck (all of"),
        ("sys.exit(7)", 7, "the trainer failed with exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "the trainer was killed by SIGKILL (all of it in"),
    ],
)
def test_the_code_is_the_trainer_s_and_the_workers_end_with_it(
    trainer, code, said, started, tmp_path
):
    child = started(f"time.sleep(1)\n{trainer}")
    _, err = child.communicate(timeout=60)
    assert child.returncode == code and said in err
    assert all(has_ended(line[-1]) for line in notes(tmp_path))
    assert [line[:-1] for line in notes(tmp_path)].count(["worker", "stopped"]) == 2


@pytest.mark.integration
def test_a_worker_that_ends_early_ends_the_run_and_is_named(started, tmp_path):
    (tmp_path / "no_workers").touch()
    child = started("time.sleep(600)")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1 and "worker ended early" in err and "no checkpoint" in err
    assert ["train", "stopped"] in [line[:-1] for line in notes(tmp_path)]


@pytest.mark.integration
def test_a_worker_that_is_killed_is_started_again_three_times_and_then_ends_the_run(
    started, tmp_path
):
    child = started("time.sleep(600)")
    for number in range(1, 5):
        deadline = time.monotonic() + 60
        while len(found := workers_of(notes(tmp_path))) < number + 1:
            assert time.monotonic() < deadline, notes(tmp_path)
            time.sleep(0.1)
        os.kill(int(found[0] if number == 1 else found[-1]), signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert err.count("worker was killed by SIGKILL (all of it in") == 4
    assert [f"it is started again, {left} times more" in err for left in (2, 1, 0)] == [True] * 3
    assert ["train", "stopped"] in [line[:-1] for line in notes(tmp_path)]
    assert all(has_ended(line[-1]) for line in notes(tmp_path))


def workers_of(lines):
    return [line[1] for line in lines if line[0] == "worker" and len(line) == 2]


@pytest.mark.integration
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_trainer_first_and_says_where_to_go_on(
    number, code, started, tmp_path
):
    child = started("time.sleep(600)")
    deadline = time.monotonic() + 30
    while len(notes(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    checkpoint = tmp_path / "run" / "checkpoints" / "batch_4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").touch()
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == code
    assert f"interrupted; `async-grpo launch {tmp_path}/run/run.toml` goes on after batch 4" in err
    ends = [line[0] for line in notes(tmp_path) if "stopped" in line]
    assert ends == ["train", "worker", "worker"]


@pytest.mark.integration
@pytest.mark.parametrize(("is_controlled", "code"), [(True, 0), (False, 143)])
def test_a_queue_s_signal_ends_the_batch_or_at_once_a_run_that_cannot_be_asked(
    is_controlled, code, started, tmp_path
):
    if is_controlled:
        (tmp_path / "is_controlled").touch()
    child = started(f"while not (os.path.exists('stop') and {is_controlled}):\n    time.sleep(0.1)")
    deadline = time.monotonic() + 30
    while "train" not in [line[0] for line in notes(tmp_path)] and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(signal.SIGUSR1)
    _, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert (["train", "stopped"] in [line[:-1] for line in notes(tmp_path)]) is not is_controlled


@pytest.mark.integration
def test_without_workers_no_head_is_started(started, file, tmp_path):
    Path(file).write_text(
        '[train]\nobjective = "sft"\nmodel_name_or_path = "m"\ndata_path = "d"\n'
        f'output_dir = "{tmp_path}/run"\n'
    )
    child = started("print('trained')")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert "trained" in out and "starting Ray" not in err
