import asyncio
import json
import pickle

from async_grpo.run.recorder import RunRecorder


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
