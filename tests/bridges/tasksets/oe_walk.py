"""A server of `openenv` whose action has a field that need not be given: uvicorn oe_walk:app"""

from typing import Literal

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

GOAL = 3


class Move(Action):
    direction: Literal["left", "right"]
    steps: int = 1


class Seen(Observation):
    text: str = ""


class Walk(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()
        self._place = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._place = 0
        return Seen(text="You stand on 0.")

    def step(self, action, timeout_s=None, **kwargs):
        self._place += action.steps if action.direction == "right" else -action.steps
        is_there = self._place == GOAL
        return Seen(text=f"You stand on {self._place}.", reward=float(is_there), done=is_there)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Walk, Move, Seen, max_concurrent_envs=2)
