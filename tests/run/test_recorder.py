import asyncio
import json
import pickle
import sys

from async_grpo.run.companions import RunRecorder


def group(*ordinals):
    return pickle.dumps([{"batch": 0, "ordinal": ordinal, "attempt": 0} for ordinal in ordinals])


def test_the_next_writer_cuts_the_dump_back_and_ends_the_one_before(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"batch": 0, "ordinal": 7, "attempt": 0}\n')

    async def scene():
        recorder = RunRecorder(str(path))
        assert await recorder.write("first", 5, [group(5, 5), group(6)]) == (0, ())
        await recorder.write("second", 6, [group(6)])
        await recorder.write("first", 5, [group(9)])  # it had died, and its call comes late
        await recorder.write("second", 6, [group(7)])

    asyncio.run(scene())
    written = [json.loads(line)["ordinal"] for line in path.read_text().splitlines()]
    assert written == [5, 5, 6, 7]


def test_a_recorder_that_takes_over_keeps_all_but_a_line_that_was_cut(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"batch": 0, "ordinal": 7, "attempt": 0}\n{"batch": 0, "ordin')

    async def scene():
        recorder = RunRecorder(str(path))  # as Ray starts it again
        await recorder.write("first", sys.maxsize, [])
        await recorder.write("first", sys.maxsize, [group(8)])

    asyncio.run(scene())
    written = [json.loads(line)["ordinal"] for line in path.read_text().splitlines()]
    assert written == [7, 8]
