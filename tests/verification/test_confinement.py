"""What is hidden, wherever it lies; run in the real confinement."""

import os
import subprocess
import sys

import pytest

from async_grpo import head
from async_grpo.verification import confinement
from async_grpo.verification.config import Isolation

LAYOUTS = {  # of a user's home: {variable: secret that it names}, options of the process
    "token in Ray's folder": ({"RAY_AUTH_TOKEN_PATH": "ray-x/auth_token"}, ["--temp-dir=ray-x"]),
    "token in ~/.ray": ({"RAY_AUTH_TOKEN_PATH": ".ray/auth_token"}, []),
    "gcloud": ({"GOOGLE_APPLICATION_CREDENTIALS": ".config/gcloud/key.json"}, []),
    "hub": ({"HF_HOME": "hf", "HF_TOKEN_PATH": "hf/stored_tokens/mine"}, []),
    "behind a link": ({"RAY_AUTH_TOKEN_PATH": "link/auth_token"}, ["--temp-dir=ray-x"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_secret_below_a_hidden_folder_is_hidden_too(layout, tmp_path, monkeypatch):
    variables, options = LAYOUTS[layout]
    (tmp_path / "link").symlink_to("ray-x")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, path in variables.items():
        monkeypatch.setenv(name, str(tmp_path / path))
    secret = (tmp_path / list(variables.values())[-1]).resolve()
    secret.parent.mkdir(parents=True)
    secret.write_text("hush")
    given = [option.replace("=", f"={tmp_path}/") for option in options]
    monkeypatch.setattr(sys, "argv", ["worker", *given])
    assert seen_of(secret) == ""


def test_a_secret_in_shared_memory_needs_no_hiding(tmp_path, monkeypatch):
    secret = f"/dev/shm/{tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", secret)
    with open(secret, "w") as file:
        file.write("hush")
    try:
        assert seen_of(secret) == ""
    finally:
        os.unlink(secret)


def seen_of(secret):
    """What a confined process reads of a file."""
    isolation = Isolation(confined=True, network=True)
    command = confinement.server_command(isolation)
    outside = command[: -len([sys.executable, *confinement.SERVER])]
    program = ["/bin/sh", "-c", f"echo in; cat {secret} 2>/dev/null || true"]
    done = subprocess.run([*outside, *program], capture_output=True, text=True, timeout=60)
    if "namespace" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.startswith("in\n"), done.stderr
    return done.stdout.removeprefix("in\n")


def test_a_private_clusters_token_lies_in_a_folder_of_its_users_alone():
    with head.private_cluster() as variables:
        token = variables["RAY_AUTH_TOKEN_PATH"]
        folder = os.path.dirname(token)
        assert (os.stat(folder).st_mode & 0o777, os.stat(token).st_mode & 0o777) == (0o700, 0o600)
        assert os.listdir(folder) == ["auth_token"]
        with open(token) as file:
            assert len(file.read()) == 64
    assert not os.path.exists(folder)
