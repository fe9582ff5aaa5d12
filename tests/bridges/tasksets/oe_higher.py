"""A server of `openenv` as its authors would write it: uvicorn oe_higher:app --port 8123"""

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Told(Observation):
    text: str = ""


class Higher(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id)
        return Told(text="Guess a number.")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        is_right = action.text.strip() == "9"
        return Told(text="Yes." if is_right else "Higher.", reward=is_right / 2, done=is_right)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Higher, Guess, Told, max_concurrent_envs=1)
