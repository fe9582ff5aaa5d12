"""Lines that stay in their files: the order of windows, and what is read of them."""

import itertools
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.config.data_files import DataSource
from async_grpo.data.lines import MalformedLine, load_records
from async_grpo.data.order import MixedOrder, QuestionStream, WindowStream
from async_grpo.data.shards import StreamedRecords
from async_grpo.util.errors import DataError

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(tuple)
seeds = st.integers(-5, 2**63)


def number_of(row):
    """The builder of these tests: a record is the line's number."""
    if not isinstance(row.get("n"), int):
        raise MalformedLine("n", expected="a number", got=repr(row.get("n")))
    return row["n"]


def write_jsonl(path, numbers):
    path.write_text("".join(json.dumps({"n": number}) + "\n" for number in numbers))


def write_parquet(path, numbers, **options):
    from pyarrow import parquet, table

    parquet.write_table(table({"n": list(numbers)}), path, **options)


def streamed(*paths, window=4, build=number_of):
    sources = [(DataSource(str(path), window=window), build) for path in paths]
    return StreamedRecords(sources, longest_prompt=9)


@given(sizes=sizes, seed=seeds, epoch=st.integers(0, 10**6))
def test_every_epoch_has_each_line_once_and_reads_a_window_after_the_other(sizes, seed, epoch):
    stream, total = WindowStream(sizes, seed=seed), sum(sizes)
    indices = [stream.index(epoch * total + position) for position in range(total)]
    assert sorted(indices) == list(range(total))
    window_of = [window for window, size in enumerate(sizes) for _ in range(size)]
    windows = [window_of[index] for index in indices]
    changes = sum(before != after for before, after in itertools.pairwise(windows))
    assert changes == len(sizes) - 1  # none is left and opened again


@given(sizes=sizes, seed=seeds, ordinals=st.lists(st.integers(0, 200), max_size=20))
def test_any_order_of_asking_gives_the_same_lines(sizes, seed, ordinals):
    in_order = [WindowStream(sizes, seed=seed).index(ordinal) for ordinal in range(201)]
    again = WindowStream(sizes, seed=seed)
    assert [again.index(ordinal) for ordinal in ordinals] == [in_order[o] for o in ordinals]


def test_windows_and_their_lines_are_shuffled_anew_in_each_epoch():
    stream = WindowStream((5, 5, 5, 5), seed=1)
    epochs = [tuple(stream.index(20 * epoch + n) for n in range(20)) for epoch in range(20)]
    assert len({tuple(index // 5 for index in epoch) for epoch in epochs}) > 10
    assert len({tuple(i for i in epoch if i < 5) for epoch in epochs}) > 15


@given(sizes=sizes, seed=seeds, slot=st.integers(0, 300), share=st.sampled_from([1.0, 0.5, 0.3]))
def test_a_replacement_is_of_the_window_of_the_question_that_it_replaces(sizes, seed, slot, share):
    stream = WindowStream(sizes, seed=seed)
    order = MixedOrder(
        sampled_share=share, questions=stream, pairs=QuestionStream(9, seed=0), samples_per_slot=1
    )
    window_of = [window for window, size in enumerate(sizes) for _ in range(size)]
    own = window_of[order.question(slot)]
    assert {window_of[order.replacement(slot, attempt=n)] for n in (1, 2, 3)} == {own}


@given(
    lengths=st.lists(st.integers(0, 11), min_size=1, max_size=4).filter(any),
    window=st.integers(1, 6),
    group=st.integers(1, 5),
    asked=st.lists(st.integers(0, 10**6), max_size=10),
)
def test_jsonl_and_parquet_shards_hold_the_same_lines_at_the_same_places(
    lengths, window, group, asked, tmp_path_factory
):
    folder, first, expected = tmp_path_factory.mktemp("shards"), 0, []
    for number, length in enumerate(lengths):
        numbers = range(first, first + length)
        expected += numbers
        write_jsonl(folder / f"{number}.jsonl", numbers)
        if length:
            write_parquet(folder / f"{number}.parquet", numbers, row_group_size=group)
        first += length
    for kind in ("jsonl", "parquet"):
        records = streamed(folder / f"*.{kind}", window=window)
        found = [asked % len(expected) for asked in asked]
        assert [records[index] for index in found] == found
        assert list(records) == expected
        whole = DataSource(str(folder / f"*.{kind}"), window=window)
        assert list(load_records(whole, number_of)) == expected


def test_blank_lines_are_no_lines_and_keep_the_numbers_of_others(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"n": 0}\n  \n{"n": 1}\n{"n": 2}\n\n\n{"n": 3}\n{"n": "x"}')
    with pytest.raises(DataError, match=r"a\.jsonl line 9, column 'n': expected a number"):
        streamed(path, window=2)


def test_a_line_that_cannot_be_used_is_counted_and_the_next_of_its_window_taken(tmp_path, caplog):
    path, good = tmp_path / "a.jsonl", range(1000)
    write_jsonl(path, [*good, 0, 1, 2, "x", 4, None, "y", 7])
    records = streamed(path)
    assert [records[index] for index in range(1000, 1008)] == [0, 1, 2, 0, 4, 7, 7, 7]
    assert (records.take_refused(), records.take_refused()) == (3, 0)
    assert "a.jsonl line 1004, column 'n': expected a number, got 'x'" in caplog.text
    again = pickle.loads(pickle.dumps(records))
    assert [again[1006], again.take_refused()] == [7, 1]  # each process counts what it has met
    write_jsonl(path, [*good, *"abcd"])
    records = streamed(path)
    with pytest.raises(DataError, match=r"line 1003, .*; nor can any other of the 4 lines"):
        records[1002]


def test_the_first_lines_of_every_shard_are_checked_before_a_run_starts(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", range(5000))
    write_jsonl(tmp_path / "b.jsonl", [5000, "x", 5002, "y"])
    with pytest.raises(DataError, match=r"b\.jsonl line 2, [^$]*line 4, .*: correct or remove"):
        streamed(tmp_path / "*.jsonl")


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_file_that_changes_ends_the_run_and_has_another_digest(write, tmp_path):
    path = tmp_path / f"a.{'jsonl' if write is write_jsonl else 'parquet'}"
    write(path, range(40))
    records, same = streamed(path), streamed(path)
    assert records.sha256 == same.sha256
    write(path, [*range(39), 41])
    with pytest.raises(DataError, match="must stay as it is while a run reads it"):
        records[30]
    assert streamed(path).sha256 != records.sha256
    path.unlink()
    with pytest.raises(DataError, match=r"cannot be read on node .*: No such file"):
        records[30]


def test_two_sources_lie_one_after_the_other(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", range(5))
    write_jsonl(tmp_path / "b.jsonl", range(5, 11))
    records = streamed(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert (records.sizes(0), records.sizes(1)) == ((4, 1), (4, 2))
    assert [*records] == [*range(11)] and [*records.firsts()] == [0, 5]
    assert len(records._kept) <= 8


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a.csv", "reads files that end in one of .jsonl, .json, .parquet"),
        ("missing/*.jsonl", "must be an existing file or folder"),
        ("array.json", "expected a JSON object"),
        ("broken.parquet", "broken.parquet cannot be read"),
        ("empty.jsonl", "must hold at least one line"),
    ],
)
def test_what_is_no_shard_is_refused(name, sentence, tmp_path):
    for text, file in (("n\n1\n", "a.csv"), ("[{}]", "array.json"), ("x", "broken.parquet")):
        (tmp_path / file).write_text(text)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=sentence):
        streamed(tmp_path / name)


def test_a_folder_has_the_lines_that_datasets_streams_of_its_split(tmp_path):
    import datasets

    folder = tmp_path / "shards"
    folder.mkdir()
    for split, first in (("train", 0), ("test", 100)):
        for number in range(3):
            numbers = range(first + 7 * number, first + 7 * number + 7)
            write_parquet(folder / f"{split}-0000{number}-of-00003.parquet", numbers)
    for split in ("train", "test"):
        source = DataSource(str(folder), split=split, window=4)
        records = StreamedRecords([(source, number_of)], longest_prompt=9)
        theirs = datasets.load_dataset(str(folder), split=split, streaming=True)
        assert [*records] == [row["n"] for row in theirs]


MEMORY = """
import json, resource, sys
from async_grpo.config.data_files import DataSource
from async_grpo.data.shards import StreamedRecords
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
source = DataSource(sys.argv[1], window=1000)
records = StreamedRecords([(source, lambda row: row["n"])], longest_prompt=9)
assert all(records[n] == n for n in range(0, len(records), 37))
print(json.dumps([len(records), peak() - before]))
"""


def test_memory_holds_a_few_windows_and_not_the_file(tmp_path):
    path = tmp_path / "large.jsonl"
    with open(path, "w") as file:
        for number in range(100_000):
            file.write(json.dumps({"n": number, "text": "x" * 1000}) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True
    )
    number, mebibytes = json.loads(done.stdout)
    assert number == 100_000
    assert mebibytes < 25 < path.stat().st_size / 2**20 / 3.5
