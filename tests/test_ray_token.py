import os

import pytest
from ray._raylet import AuthenticationMode, Config, get_authentication_mode

from async_grpo.cluster.head import check_token, refused, settle_authentication
from async_grpo.util.errors import ClusterError

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def no_token(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    os.environ.pop("RAY_AUTH_MODE", None)  # what was set before is put back after this
    Config.initialize("")


def write_token(tmp_path, text="secret"):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(text)


def test_a_token_is_used_where_there_is_one(tmp_path):
    settle_authentication()
    assert "RAY_AUTH_MODE" not in os.environ
    write_token(tmp_path)
    settle_authentication()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_process_that_has_imported_ray_sends_its_token_too(tmp_path):
    Config.initialize("")
    assert get_authentication_mode() == AuthenticationMode.DISABLED
    write_token(tmp_path)
    settle_authentication()
    assert get_authentication_mode() == AuthenticationMode.TOKEN


@pytest.mark.parametrize("place", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_may_come_from_the_environment(place, monkeypatch, tmp_path):
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv(place, str(tmp_path / "token"))
    settle_authentication()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_mode_that_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    settle_authentication()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_a_file_that_holds_nothing_is_no_token(tmp_path):
    write_token(tmp_path, "\n")
    settle_authentication()
    assert "RAY_AUTH_MODE" not in os.environ


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "refuses the token of {home}/.ray/auth_token: put there what `ray get-auth-token`"),
        ({"RAY_AUTH_TOKEN": "x"}, "refuses the token of RAY_AUTH_TOKEN: put"),
        ({"RAY_AUTH_TOKEN_PATH": "{home}/mine"}, "refuses the token of {home}/mine: put"),
        ({"RAY_AUTH_TOKEN_PATH": "/no"}, "wants a token, and none was sent, for there is none in "),
        (
            {"RAY_AUTH_MODE": "disabled"},
            "wants a token, and none was sent, for RAY_AUTH_MODE is 'disabled': unset it",
        ),
    ],
)  # fmt: skip
def test_a_refusal_says_which_token_was_sent_or_why_none(
    variables, sentence, monkeypatch, tmp_path
):
    write_token(tmp_path)
    (tmp_path / "mine").write_text("secret")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    settle_authentication()
    check_token()
    error = str(refused("10.0.0.1:1"))
    assert error.startswith("the Ray cluster at 10.0.0.1:1 " + sentence.format(home=tmp_path))


def test_a_machine_without_a_token_is_told_where_to_put_it(tmp_path):
    settle_authentication()
    place = tmp_path / ".ray" / "auth_token"
    assert f"none was sent, for there is none in {place}: put there what" in str(refused("x:1"))


def test_a_token_that_is_asked_for_and_missing_is_told_before_ray_is_asked(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ClusterError, match=r"RAY_AUTH_MODE=token needs a token, but there is none"):
        check_token()
