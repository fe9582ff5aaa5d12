"""Who may use an output folder: processes that lock it, and are killed."""

import errno
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_grpo.cli import train
from async_grpo.config.train_config import TrainConfig
from async_grpo.run import output_folder
from async_grpo.run.output_folder import LAUNCH, LOCK_FILE, check_free, folder_held, lock
from async_grpo.util.errors import ConfigError

HOLDER = """
import os, sys, time
from pathlib import Path
from async_grpo.run.output_folder import lock

file = lock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


class Main:
    """A rank that is alone."""

    def on_main(self, prepare):
        return prepare()


@contextmanager
def another_trainer(folder):
    """A process that has locked a folder, and the id of a child that outlives it."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            os.kill(child, 9)


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_second_trainer_is_refused_and_told_who_the_first_is(tmp_path, algorithm):
    config = TrainConfig(
        model_name_or_path="m", data_path="d", output_dir=str(tmp_path / "a"), algorithm=algorithm
    )
    with another_trainer(tmp_path / "a") as first:
        with pytest.raises(ConfigError) as refused:
            train._train(config, Main(), stop=None)
        who = rf"\(process {first.pid} on {socket.gethostname()}, since 20\S+\)"
        assert refused.match(
            rf"^--output-dir \S+/a is in use by another trainer {who}: wait for its end, or give "
            "another --output-dir$"
        )
        assert [file.name for file in (tmp_path / "a").iterdir()] == [LOCK_FILE]
        lock(tmp_path / "b").close()


def test_a_killed_trainer_gives_its_folder_back_although_a_child_lives(tmp_path):
    with another_trainer(tmp_path) as first:
        with pytest.raises(ConfigError):
            lock(tmp_path)
        first.kill()
        first.wait()
        with lock(tmp_path):
            assert f'"pid": {os.getpid()}'.encode() in Path(tmp_path / LOCK_FILE).read_bytes()


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", refuse)
    lock(tmp_path).close()
    (told,) = caplog.messages
    assert told.startswith(f"the file system of --output-dir {tmp_path} cannot lock files (No loc")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/run \(Not a directory\): choose another --output"):
        lock(tmp_path / "file" / "run")


def test_a_run_that_is_refused_leaves_no_folder_and_one_that_was_there_stays(tmp_path):
    (tmp_path / "old").mkdir()
    for name in ("new", "old", "used"):
        with pytest.raises(ConfigError), folder_held(tmp_path / name, Main()):
            if name == "used":
                (tmp_path / name / "metrics").touch()
            raise ConfigError("refused")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "used"]


def test_a_lock_whose_file_a_refused_run_removed_is_taken_again(tmp_path, monkeypatch):
    taken = []

    def take(folder, byte):
        taken.append(file := locked(folder, byte))
        if len(taken) == 1:
            (folder / LOCK_FILE).unlink()
        return file

    locked = output_folder._locked
    monkeypatch.setattr(output_folder, "_locked", take)
    with lock(tmp_path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), (tmp_path / LOCK_FILE).stat())
    assert len(taken) == 2


def in_another_process(code, folder):
    done = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}{code}", str(folder)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


PRELUDE = """
import sys
from pathlib import Path
from async_grpo.run.output_folder import *
from async_grpo.run.output_folder import LAUNCH
folder = Path(sys.argv[1])
"""


def test_a_launch_and_its_trainer_hold_a_folder_together_and_nobody_else_joins_them(tmp_path):
    with lock(tmp_path, byte=LAUNCH):
        assert in_another_process("lock(folder)", tmp_path) == (0, "")
        for code in ("lock(folder, byte=LAUNCH)", "check_free(folder)"):
            code, said = in_another_process(code, tmp_path)
            assert code == 1 and "is in use by another trainer (process" in said
    assert in_another_process("check_free(folder); lock(folder, byte=LAUNCH)", tmp_path) == (0, "")


def test_a_launch_is_refused_where_a_trainer_has_the_folder_and_leaves_its_files(tmp_path):
    with another_trainer(tmp_path) as trainer:
        before = (tmp_path / LOCK_FILE).read_bytes()
        for refused in (lambda: lock(tmp_path, byte=LAUNCH), lambda: check_free(tmp_path)):
            with pytest.raises(ConfigError, match=f"in use by another trainer.+ {trainer.pid} "):
                refused()
        assert (tmp_path / LOCK_FILE).read_bytes() == before
        with pytest.raises(ConfigError):  # who has asked has not taken its lock away
            lock(tmp_path)
    check_free(tmp_path)


def test_asking_who_has_a_folder_makes_none(tmp_path):
    check_free(tmp_path / "new")
    assert not (tmp_path / "new").exists()
