"""Whose doing a failure of an episode was, and what follows from it.

              before the policy's first token   after it
    model     the episode is begun again        it ends there, and is graded as it stands
    server    begun again when it is back       the same request again, if it surely did not arrive
                                                or may arrive twice; else as for state
    state     begun again                       the whole group is played again, once
    unknown   begun again                       the group fails
    limit     the group fails                   the group fails

After the first token no member of a group is ever sampled again alone: the try that is kept would
be the one in which the model did not do what had failed.

`reach` sends a request to a server again while that is away. It tells the controller, which has the
type of questions stand still (`batching.failures`), and lets it wait so long.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar
from enum import StrEnum
from traceback import walk_tb
from typing import Literal, TypeVar

from async_grpo.types import Verdict
from async_grpo.util.deadlines import SERVER_PROBE_S
from async_grpo.util.errors import AsyncGrpoError, escaped

TRIES = 3  # of an episode that has not begun
GROUP_TRIES = 2
# By the names of classes, for clients' libraries need not be installed here.
NOT_SENT = frozenset(
    {"ConnectionRefusedError", "ServerAway", "gaierror"}
    | {"ConnectError", "ConnectTimeout", "PoolTimeout"}  # of httpx and requests
    | {"ClientConnectorError", "ConnectTimeoutError", "NewConnectionError", "NameResolutionError"}
)
CUT = frozenset(
    {"ConnectionError", "TimeoutError", "ConnectionClosed", "TransportError", "Timeout"}
    | {"APIConnectionError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead"}
    | {"ProtocolError"}
)
NO_WAY = frozenset({errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH})
HTTP_AWAY = {429: "not sent", 503: "not sent", 502: "cut", 504: "cut"}  # refused; nobody knows
T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0  # between tries: 0.25, 0.5, 1, ... 5, 5, 5
Tell = Callable[[str], Coroutine[object, object, None]]  # of an outage, while it is awaited
TELL: ContextVar[Tell | None] = ContextVar("tell", default=None)  # of the episode that is played


class ModelError(Exception):
    """What the model wrote cannot be carried out: its episode ends there, graded as it stands."""

    def __init__(self, message: str = "", *, verdict: Verdict | None = None) -> None:
        """`verdict`: of an environment whose episodes have one of their own."""
        super().__init__(message)
        self.verdict = verdict


class Cause(StrEnum):
    """Whose doing it was."""

    MODEL = "model"
    SERVER = "server"  # one refuses, resets, or does not answer
    STATE = "state"  # what the episode had built up is gone
    UNKNOWN = "unknown"  # nobody said
    LIMIT = "limit"  # the user's own


class Next(StrEnum):
    """What follows."""

    END = "end the episode"
    REQUEST = "ask the same again"
    MEMBER = "begin the episode again"
    GROUP = "play the group again"
    FAIL = "fail the group"


def decide(
    cause: Cause, *, has_sampled: bool, is_repeatable: bool = False, num_tries: int = 1
) -> Next:
    """What follows from a failure, the `num_tries`-th of its episode, or its group.

    `has_sampled`: a turn has been asked for. `is_repeatable`: see there.

    >>> decide(Cause.UNKNOWN, has_sampled=False), decide(Cause.UNKNOWN, has_sampled=True)
    (<Next.MEMBER: 'begin the episode again'>, <Next.FAIL: 'fail the group'>)
    """
    if cause is Cause.LIMIT:
        return Next.FAIL
    if cause is Cause.SERVER and is_repeatable:
        return Next.REQUEST
    if not has_sampled:
        is_over = num_tries >= TRIES and cause is not Cause.SERVER
        return Next.FAIL if is_over else Next.MEMBER
    if cause is Cause.MODEL:
        return Next.END
    is_again = cause in (Cause.SERVER, Cause.STATE) and num_tries < GROUP_TRIES
    return Next.GROUP if is_again else Next.FAIL


def cause_of(error: BaseException) -> Cause:
    """The cause that an exception tells of, itself or what it was raised from.

    >>> cause_of(ConnectionResetError()), cause_of(KeyError("x")), cause_of(ModelError("x"))
    (<Cause.SERVER: 'server'>, <Cause.UNKNOWN: 'unknown'>, <Cause.MODEL: 'model'>)
    """
    if isinstance(error, ModelError):
        return Cause.MODEL
    found = getattr(error, "cause", None)  # of an `EpisodeFailed`, or whatever is derived from it
    if isinstance(found, Cause):
        return found
    return Cause.SERVER if request_of(error) else Cause.UNKNOWN


def is_repeatable(error: BaseException, *, is_idempotent: bool) -> bool:
    """Whether the request that failed so may be sent again: it did not arrive, or may do twice."""
    return request_of(error) == "not sent" or (is_idempotent and cause_of(error) is Cause.SERVER)


def request_of(error: BaseException) -> Literal["not sent", "cut", ""]:
    """What became of the request to a server that failed so; empty: the failure is another one.

    >>> request_of(ConnectionRefusedError()), request_of(ConnectionResetError())
    ('not sent', 'cut')
    >>> request_of(FileNotFoundError())
    ''
    """
    if isinstance(getattr(error, "cause", None), Cause):
        return ""  # who has raised it knows more
    kinds = [_kind(each) for each in _chain(error)]
    return "not sent" if "not sent" in kinds else "cut" if "cut" in kinds else ""


def _kind(error: BaseException) -> str:
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, AsyncGrpoError) and "ServerAway" not in names:
        return ""  # of this cluster, which has waited for it already
    answer = getattr(error, "response", None)
    statuses = [getattr(error, name, None) for name in ("code", "status", "status_code")]
    statuses.append(getattr(answer, "status_code", None))
    if found := [each for each in statuses if isinstance(each, int) and 400 <= each < 600]:
        return HTTP_AWAY.get(found[0], "")
    if names & NOT_SENT or (isinstance(error, OSError) and error.errno in NO_WAY):
        return "not sent"
    return "cut" if names & CUT else ""


def address_of(error: BaseException) -> tuple[str, int] | None:
    """Of the server that failed so, which clients' frames hold; None where none does."""
    for each in _chain(error):
        frames = [frame.f_locals for frame, _ in walk_tb(each.__traceback__)]
        clients = [getattr(names.get("self"), "__dict__", {}) for names in frames]
        for names in (vars(each), *frames, *clients):
            hosts = (names.get("host"), names.get("port"))
            for found in (names.get("address"), hosts, (names.get("remote_host"), hosts[1])):
                match found:
                    case (str(host), int(port), *_):
                        return host, port
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """It, and what it was raised from, as clients' libraries say it."""
    if error is None:
        return
    yield error
    inner = (error.__cause__, getattr(error, "reason", None), *error.args[:1])
    for each in inner:
        if isinstance(each, BaseException) and each is not error:
            yield from _chain(each)


class Outage:
    """A server is away, which everybody knows until `close`."""

    def __init__(self, telling: Coroutine[object, object, None]) -> None:
        self._told = asyncio.create_task(telling, name="outage")
        self._pause_s = FIRST_PAUSE_S

    async def pause(self) -> None:
        """Before the next try; raises when nobody may wait any longer."""
        await asyncio.wait({self._told}, timeout=self._pause_s)
        if self._told.done():
            self._told.result()
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        """It is back, or nobody waits for it any more."""
        self._told.cancel()


async def reach(
    send: Callable[[], Awaitable[T]],
    *,
    is_idempotent: bool = False,
    who: str = "",
    tell: Tell | None = None,
    check: Callable[[Exception], None] = lambda error: None,
) -> T:
    """What `send` gives, which is called again while its server is away.

    Raises the first error that is another one, any where no episode is played, and what `check`
    raises of one before it is sent again.
    """
    tell, outage = tell or TELL.get(), None
    try:
        while True:
            try:
                return await send()
            except Exception as error:  # of the user's code
                may_repeat = is_repeatable(error, is_idempotent=is_idempotent)
                follows = decide(cause_of(error), has_sampled=True, is_repeatable=may_repeat)
                if not tell or follows is not Next.REQUEST:
                    raise
                check(error)
                outage = outage or Outage(tell(escaped(f"{who}{error!r}")))
            await outage.pause()
    finally:
        if outage:
            outage.close()


async def until_back(error: BaseException, tell: Tell) -> None:
    """Wait for the server whose failure was `error`, as long as it refuses to be connected with.

    What was asked of it cannot be asked again from here.
    """
    if address := address_of(error):

        async def connect() -> None:
            async with asyncio.timeout(SERVER_PROBE_S):
                _, writer = await asyncio.open_connection(*address)
            writer.close()

        await reach(connect, is_idempotent=True, who=f"{error!r}: ", tell=tell)
