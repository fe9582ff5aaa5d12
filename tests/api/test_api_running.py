"""A run from a script: its steps, its end, and what ends with it. The run itself is a stand-in."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import async_grpo
from async_grpo.api import running
from async_grpo.util.errors import ConfigError, RunFailed

REPOSITORY = Path(__file__).parents[2]
# In the place of `async-grpo launch`: trains as `script.py` says, notes how it was ended.
COMMAND = """
import json, os, signal, sys, time, tomllib
from pathlib import Path
sys.path.insert(0, "{repository}")
from async_grpo.launch.interrupts import end_with_stdin
run = tomllib.loads(Path(sys.argv[2]).read_text())
folder = Path(run["train"]["output_dir"])
def ended(number, _):
    Path("ending").write_text(signal.Signals(number).name)
    os.rename("ending", "ended")
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, ended)
assert sys.argv[3] == "--ends-with-stdin"
end_with_stdin()
def accepted():
    (folder / "training_params.json").write_text("{{}}")
def row(step, **metrics):
    line = json.dumps({{"step": step, "iteration": step - 1, **metrics}}) + "\\n"
    for half in (line[:9], line[9:]):
        with open(folder / "training_metrics.jsonl", "a") as file:
            file.write(half)
        time.sleep(0.05)
Path("started").touch()
exec(Path("script.py").read_text())
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("command.py").write_text(COMMAND.format(repository=REPOSITORY))
    monkeypatch.setattr(running, "COMMAND", (sys.executable, "command.py"))
    return {"train": {"model_name_or_path": "m", "data_path": "d", "output_dir": "run",
                      "num_training_batches": 3}}  # fmt: skip


def script(text):
    Path("script.py").write_text(text)


def wait_for(path):
    deadline = time.monotonic() + 30
    while not Path(path).exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)


def test_each_step_is_told_once_and_the_result_has_all(config):
    script("accepted()\nfor step in (1, 2, 3): row(step, avg_reward=step / 4)")
    seen = []
    result = async_grpo.train(config, on_step=seen.append)
    assert [(step.number, step.reward, step["iteration"]) for step in seen] == [
        (1, 0.25, 0), (2, 0.5, 1), (3, 0.75, 2),
    ]  # fmt: skip
    assert str(seen[1]) == "reward   0.5  batch 2/3"
    assert result.history == tuple(step.metrics for step in seen)
    assert repr(result) == "<Result of run: 3 steps, reward 0.75>"


def test_rows_of_an_older_run_are_not_told(config):
    Path("run").mkdir()
    Path("run/training_metrics.jsonl").write_text('{"step": 9}\n')
    Path("run/training_params.json").write_text("{}")
    script("time.sleep(0.5)\nos.unlink(folder / 'training_metrics.jsonl')\naccepted()\nrow(1)")
    assert [step.number for step in async_grpo.start(config)] == [1]


def test_a_step_that_is_taken_again_is_told_once(config):
    script(
        "accepted()\nrow(1)\nrow(2)\ntime.sleep(0.5)\n"
        "os.truncate(folder / 'training_metrics.jsonl', 0)\ntime.sleep(0.5)\n"
        "row(1)\nrow(2)\nrow(3)"
    )
    assert [step.number for step in async_grpo.start(config)] == [1, 2, 3]


def test_a_run_that_fails_raises_its_sentence_after_its_steps(config):
    script("accepted()\nrow(1)\nprint('error: no luck', file=sys.stderr)\nsys.exit(1)")
    seen = []
    with pytest.raises(RunFailed, match="the run failed with exit code 1: no luck") as error:
        async_grpo.train(config, on_step=seen.append)
    assert [step.number for step in seen] == [1] and error.value.folder == Path("run")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_takes_the_run_down(error, config):
    script("accepted()\nrow(1)\ntime.sleep(60)")

    def refuse(step):
        raise error

    with pytest.raises(error):
        async_grpo.train(config, on_step=refuse)
    assert Path("ended").read_text() == "SIGINT"


def test_leaving_the_block_early_ends_the_run_and_is_no_failure(config):
    script("accepted()\nrow(1)\nrow(2)\ntime.sleep(60)")
    with async_grpo.start(config) as run:
        for step in run:
            if step.number == 2:
                break
        assert run.is_running
    assert not run.is_running and Path("ended").read_text() == "SIGINT"
    assert len(run.result.history) == 2


def test_a_run_that_was_stopped_is_iterated_to_its_end(config):
    script("accepted()\nrow(1)\ntime.sleep(60)")
    with async_grpo.start(config) as run:
        steps = []
        for step in run:
            steps.append(step.number)
            run.stop()
    assert steps == [1] and run.wait().history == run.result.history


def test_a_run_does_not_outlive_a_script_that_is_killed(config, tmp_path):
    script("accepted()\ntime.sleep(60)")
    code = (
        "import sys\nfrom async_grpo.api import running\n"
        "running.COMMAND = (sys.executable, 'command.py')\n"
        f"running.train({config!r})"
    )
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen([sys.executable, "-c", code], env=variables)
    wait_for("started")
    child.kill()
    child.wait(timeout=10)
    wait_for("ended")
    assert Path("ended").read_text() == signal.SIGTERM.name


def test_importing_the_package_imports_its_errors_alone():
    code = "import sys, async_grpo; print(*(name for name in sys.modules if 'async_grpo' in name))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True,
        cwd=REPOSITORY,
    )  # fmt: skip
    found = {name for name in done.stdout.split() if not name.startswith("__")}
    assert found == {"async_grpo", "async_grpo.errors", "async_grpo.util", "async_grpo.util.errors"}


def test_every_name_of_the_package_is_there():
    assert all(hasattr(async_grpo, name) for name in async_grpo.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        async_grpo.trian  # noqa: B018


@pytest.mark.parametrize("overwrite", [True, False])
def test_overwrite_as_an_argument_is_typed_to_the_launch(overwrite, config):
    script("accepted()\nPath('typed').write_text(' '.join(sys.argv[4:]))")
    async_grpo.train(config, overwrite=overwrite)
    words = ["--trust", *["--overwrite"] * overwrite]  # the file that is launched is our own
    assert Path("typed").read_text().split() == words


def test_a_second_run_in_a_folder_in_use_leaves_the_first_one_s_log(config):
    script("from async_grpo.run.output_folder import lock\nheld = lock(folder)\naccepted()\n"
           "print('of the first', flush=True)\nPath('held').touch()\ntime.sleep(60)")  # fmt: skip
    with async_grpo.start(config) as first:
        wait_for("held")
        with pytest.raises(ConfigError, match="in use by another trainer"):
            async_grpo.start(config)
        assert "of the first" in first.log.read_text()
