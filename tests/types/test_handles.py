import inspect

import pytest
from ray.exceptions import RayActorError

from async_grpo.cluster.handles import (
    ControllerHandle,
    GatewayHandle,
    RecorderHandle,
    WitnessHandle,
    WorkerHandle,
    translated,
)
from async_grpo.controller.controller import Controller
from async_grpo.environments.environment_worker import EnvironmentWorker
from async_grpo.environments.service import ServiceWorker
from async_grpo.gateway.run_gateway import Gateway
from async_grpo.rollout.generation_worker import GenerationWorker
from async_grpo.rollout.judge import JudgeWorker
from async_grpo.rollout.logprob_worker import LogprobWorker
from async_grpo.run.companions import RunRecorder, Witness
from async_grpo.util.errors import ConfigError
from async_grpo.verification.pool import VerifierPool

EVERY_WORKER = {"info", "ping", "abort_all"}
DEVICE_TRANSPORT = {"open_route", "expect_weights", "receive_weights"}
OF_ROLE = {
    GenerationWorker: {"load_weights", "generate", "sleep", *DEVICE_TRANSPORT},
    LogprobWorker: {"load_weights", "logprobs", "teach", "head", "join_express", "serve_express"},
    EnvironmentWorker: {"play"},
    JudgeWorker: {"answer"},
    ServiceWorker: {"answer"},
    VerifierPool: {"verify", "try_out", "take_share", "complaint"},
}
ACTORS = [
    (Controller, ControllerHandle, set(ControllerHandle.__annotations__)),
    (Gateway, GatewayHandle, set(GatewayHandle.__annotations__)),
    (RunRecorder, RecorderHandle, set(RecorderHandle.__annotations__)),
    (Witness, WitnessHandle, set(WitnessHandle.__annotations__)),
    *((actor, WorkerHandle, EVERY_WORKER | methods) for actor, methods in OF_ROLE.items()),
]


@pytest.mark.parametrize(("actor", "handle", "methods"), ACTORS)
def test_an_actor_has_the_methods_of_its_handle_and_as_many_arguments(actor, handle, methods):
    for name in methods:
        stated = handle.__annotations__[name].removeprefix("Method[")
        arguments = stated[1 : stated.index("]")] if stated.startswith("[") else None
        method = getattr(actor, name)
        assert inspect.iscoroutinefunction(method)
        if arguments is not None:
            inspect.signature(method).bind(None, *_split(stated))


def test_no_method_of_a_handle_is_nobodys():
    assert EVERY_WORKER.union(*OF_ROLE.values()) == set(WorkerHandle.__annotations__)


@pytest.mark.parametrize(
    ("raised", "shown"),
    [(ConfigError, "no room"), (ValueError, "builtins.ValueError: no room")],
)
def test_a_death_is_told_without_the_name_of_our_error(raised, shown):
    name = f"{raised.__module__}.{raised.__qualname__}"
    error = RayActorError(error_msg=f"ray::Actor.__init__()\n{name}: no room")
    assert str(translated(error, "the worker")) == f"the worker died: {shown}"


def _split(stated):
    """The types of the arguments in `[A, tuple[B, ...]], R]`."""
    depth, parts, part = 0, [], ""
    for letter in stated[1:]:
        if letter == "]" and depth == 0:
            break
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += letter
    return [each for each in [*parts, part] if each.strip()]
