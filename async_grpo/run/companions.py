"""The actors beside rank 0: they write for the controller, end with the trainer, run users' rules.

The recorder writes the dump of samples.

consumes:     lines of samples, from the run's batcher
produces:     the dump of samples, one of held-out samples, and one of each gradient step's samples
waits for:    nothing: it writes each call's lines before the next call begins
unblocked by: –

The witness does nothing: its end tells the controller that the trainer has ended.

consumes:     nothing
produces:     nothing
waits for:    the end of the trainer's process, with which Ray ends it
unblocked by: –

The rules process runs the controller's half of a user's algorithm.

consumes:     verified groups, and the groups of a step
produces:     the same groups with advantages, masks and contributions
waits for:    nothing: it serves one call after the other
unblocked by: the controller's calls

All end with the trainer's process. Ray restarts a recorder or a witness that dies by itself. Lines
that a dead recorder had not written are lost; the batcher counts them. The death of a witness alone
ends no run: rank 0's heartbeats must have stopped too. An exception of the user's rules, the end of
their process, or 60 s without an answer end the run, not the controller; the error names the line.
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from async_grpo.algorithms.base import Algorithm, GroupRules, LocalRules
from async_grpo.cluster import handles
from async_grpo.config.run_options import RecordingOptions
from async_grpo.environments.chat.find import find_tokenizer
from async_grpo.telemetry.sample_dump import UNLIMITED, SampleDump, held_out_file, steps_file
from async_grpo.types import Group
from async_grpo.util import deadlines
from async_grpo.util.errors import WorkerError
from async_grpo.util.user_code import UserCode

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster

T = TypeVar("T")
Q = TypeVar("Q")
Make = Callable[[UserCode | None], Algorithm]


class RunRecorder:
    """Writes the lines that one batcher of the run after the other sends."""

    def __init__(self, path: str, *, max_bytes: float = UNLIMITED, model: str = "") -> None:
        """`model`: its tokenizer decodes what the model has read between turns of an episode."""
        self._model = model
        self._dump = SampleDump(Path(path), max_bytes=max_bytes)
        self._held_out = SampleDump(held_out_file(Path(path)), max_bytes=max_bytes)
        self._steps = SampleDump(steps_file(Path(path)), unit="steps")
        self._all = (self._dump, self._held_out, self._steps)
        self._writer = ""
        self._earlier: set[str] = set()

    async def write(
        self, writer: str, next_ordinal: int, groups: Sequence[bytes]
    ) -> tuple[int, tuple[str, ...]]:
        """Append pickled groups of sample lines, or lines of steps.

        Returns the number of samples lost so far, and warnings to log. The first call of a writer
        cuts the dump back to `next_ordinal`, where the writer continues, and removes a line that a
        killed recorder left unfinished. Late calls of an earlier writer are ignored: its samples
        are sampled again.
        """
        if writer in self._earlier:
            return 0, ()
        if writer != self._writer:
            self._earlier.add(self._writer)
            self._writer = writer
            for each in self._all:
                each.cut_back(next_ordinal)
        for lines in map(pickle.loads, groups):
            if isinstance(lines, dict):
                self._steps.write([lines])
            else:
                dump = self._held_out if "set" in lines[0] else self._dump
                dump.write([self._in_words(line) for line in lines])
        notices = [notice for each in self._all for notice in each.take_notices()]
        return self._dump.num_lost + self._held_out.num_lost, tuple(notices)

    def _in_words(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line with text in place of the token ids that the model has read between turns."""
        for turn in line.get("turns", ()):
            if "token_ids" in turn:
                read = turn.pop("token_ids")
                text = find_tokenizer(self._model).decode(read)
                turn.update(text=text, num_tokens=len(read))
        return line


def start_recorder(
    recording: RecordingOptions, cluster: Cluster, *, model: str
) -> handles.RecorderHandle | None:
    """Start a recorder on this node, owned by this process; None where none is needed."""
    if not recording.dump_samples_filename:
        return None
    path = Path(recording.output_dir, recording.dump_samples_filename).absolute()
    max_bytes = recording.dump_max_gib * 2**30 or UNLIMITED
    actor = cluster.actor(RunRecorder, max_restarts=-1)
    recorder: handles.RecorderHandle = actor.remote(str(path), max_bytes=max_bytes, model=model)
    return recorder


class Witness:
    """Lives as long as rank 0, whose process owns it."""

    async def until_death(self) -> None:
        """Never return: the caller gets an error from Ray when this process ends."""
        await asyncio.Event().wait()


def start_witness(cluster: Cluster) -> handles.WitnessHandle:
    """Start a witness on this node, owned by this process."""
    witness: handles.WitnessHandle = cluster.actor(Witness, max_restarts=-1).remote()
    return witness


class RulesProcess:
    """Runs the user's rules; an error of theirs names the line that failed."""

    def __init__(self, make: Make, code: UserCode) -> None:
        self._code = code
        self._rules = LocalRules(make(code))

    async def finish_group(self, group: Group) -> Group:
        return await self._run_named(self._rules.finish_group, group)

    async def finish_step(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        return await self._run_named(self._rules.finish_step, groups)

    async def _run_named(self, method: Callable[[Q], Awaitable[T]], argument: Q) -> T:
        try:
            return await method(argument)
        except Exception as error:  # the user's own code may raise anything
            line = self._code.line_in(traceback.extract_tb(error.__traceback__))
            raise WorkerError(
                f"--algorithm {self._code.name} raised {type(error).__name__}: {error} ({line}): "
                "correct it"
            ) from None


class RemoteRules:
    """The rules of a `RulesProcess`, as the controller calls them."""

    def __init__(self, process: Any, algorithm: Algorithm) -> None:
        self.needs = algorithm.needs
        self.waits_for_step = algorithm.waits_for_step
        self._process = process
        self._who = f"--algorithm {algorithm.config.objective.algorithm}"

    async def finish_group(self, group: Group) -> Group:
        return await self._answer(self._process.finish_group.remote(group))

    async def finish_step(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        return await self._answer(self._process.finish_step.remote(groups))

    async def _answer(self, call: Awaitable[T]) -> T:
        return await handles.call(call, timeout_s=deadlines.ANSWER_S, who=self._who)


def start_rules(make: Make, code: UserCode | None, cluster: Cluster) -> GroupRules:
    """The rules of the run's algorithm: in the controller for a shipped one, else in a process.

    `make` builds the algorithm, from the user's `code` where that is not None.
    """
    algorithm = make(code)
    if code is None:
        return LocalRules(algorithm)
    process = cluster.actor(RulesProcess)  # on this node, which has what the code imports
    return RemoteRules(process.remote(make, code), algorithm)
