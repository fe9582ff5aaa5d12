import pytest

from async_grpo.environments import causes, episode, play


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Nobody waits between tries, or long for what another process says."""
    monkeypatch.setattr(episode, "AFTER_LOSS_S", 0.0)
    monkeypatch.setattr(play, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(causes, "FIRST_PAUSE_S", 0.01)
