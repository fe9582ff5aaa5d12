"""The two actors beside rank 0: one writes, so that the controller need not; one only lives.

The recorder writes what a run leaves behind sample by sample.

consumes:     lines of samples, from the run's batcher
produces:     the dump of samples, and of what each gradient step was made of
waits for:    nothing: each call is written before the next one begins
unblocked by: –

Of the witness the end alone is of interest: it tells the controller of the trainer's.

consumes:     nothing
produces:     nothing
waits for:    the end of the trainer's process, with which Ray ends it
unblocked by: –

Both end with the trainer's process. Ray starts one that dies by itself again. What a recorder had
been sent and had not written is lost, and counted by whoever has sent it. A witness's death accuses
nobody: a run ends when its witness is gone and rank 0 no longer says that it lives.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.config.run_options import RecordingOptions
from async_grpo.environments.chat.find import find_tokenizer
from async_grpo.telemetry.sample_dump import UNLIMITED, SampleDump, steps_file

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.cluster.handles import RecorderHandle, WitnessHandle


class RunRecorder:
    """Takes the lines of one writer after the other: each batcher of the run is one."""

    def __init__(self, path: str, *, max_bytes: float = UNLIMITED, model: str = "") -> None:
        """`model`: whose tokenizer says what episodes of many turns have read."""
        self._model = model
        self._dump = SampleDump(Path(path), max_bytes=max_bytes)
        self._steps = SampleDump(steps_file(Path(path)), unit="steps")
        self._writer = ""
        self._earlier: set[str] = set()

    async def write(
        self, writer: str, next_ordinal: int, groups: Sequence[bytes]
    ) -> tuple[int, tuple[str, ...]]:
        """Append groups of lines, or lines of steps; samples lost, and sentences for people.

        The first call of a writer cuts the dump back to `next_ordinal`, from where it goes on, and
        removes what a recorder that was killed had begun to write;
        what an earlier writer had sent by then and comes late is sampled again.
        """
        if writer in self._earlier:
            return 0, ()
        if writer != self._writer:
            self._earlier.add(self._writer)
            self._writer = writer
            self._dump.cut_back(next_ordinal)
            self._steps.cut_back(next_ordinal)
        for lines in map(pickle.loads, groups):
            if isinstance(lines, dict):
                self._steps.write([lines])
            else:
                self._dump.write([self._in_words(line) for line in lines])
        return self._dump.num_lost, self._dump.take_notices() + self._steps.take_notices()

    def _in_words(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line with text in the place of the ids that the model has read between its turns."""
        for turn in line.get("turns", ()):
            if "token_ids" in turn:
                read = turn.pop("token_ids")
                text = find_tokenizer(self._model).decode(read)
                turn.update(text=text, num_tokens=len(read))
        return line


def start_recorder(
    recording: RecordingOptions, cluster: Cluster, *, model: str
) -> RecorderHandle | None:
    """The handle of a new recorder, owned by this process and on its node; None: none is needed."""
    if not recording.dump_samples_filename:
        return None
    path = Path(recording.output_dir, recording.dump_samples_filename).absolute()
    max_bytes = recording.dump_max_gib * 2**30 or UNLIMITED
    actor = cluster.actor(RunRecorder, max_restarts=-1)
    recorder: RecorderHandle = actor.remote(str(path), max_bytes=max_bytes, model=model)
    return recorder


class Witness:
    """Whoever has begun a run owns one."""

    async def until_death(self) -> None:
        """Never return: whoever waits for it hears of the process' death as Ray's error."""
        await asyncio.Event().wait()


def start_witness(cluster: Cluster) -> WitnessHandle:
    """The handle of a new witness, owned by this process and on its node."""
    witness: WitnessHandle = cluster.actor(Witness, max_restarts=-1).remote()
    return witness
