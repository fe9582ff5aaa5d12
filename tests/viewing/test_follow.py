"""The page of a run that goes on, as its server reads and tells it."""

import json
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts_pages import Page, held_out, sample, write, write_dump

from async_grpo.cli.main import main
from async_grpo.telemetry.jsonl import to_json
from async_grpo.telemetry.sample_dump import SampleDump
from async_grpo.viewing.page.follow import Followed, PageServer

LINES = [sample(n, k, input=f"question {n % 3}") for n in range(12) for k in range(2)]


def followed(folder, *, max_samples=1000, max_bytes=2**30):
    return Followed(
        folder, max_samples=max_samples, max_bytes=max_bytes, find_tokenizer=lambda _: None
    )


def append(file, lines):
    with file.open("ab") as opened:
        opened.writelines(to_json(line) + b"\n" for line in lines)


class Seen:
    """What a page has after it has asked once."""

    def __init__(self, of):
        self.version = of.part("version").decode()
        self.header = json.loads(of.part("header"))
        generation, size = self.header["generation"], self.header["num_samples"]
        self.numbers = of.part(f"columns-{generation}-{size}")
        self.details = [
            told
            for block in range(len(self.header["blocks"]))
            for told in json.loads(of.part(f"block-{generation}-{block}"))
        ]


def written(folder):
    """The same of the page that is written at once."""
    page = Page(write(folder))
    own = {name: page.header[name] for name in page.header if name != "blocks"}
    return own, page.details


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6000), max_size=8))
def test_what_is_followed_is_what_is_written_however_its_bytes_arrive(tmp_path_factory, cuts):
    folder = write_dump(tmp_path_factory.mktemp("run"), [])
    content = b"".join(to_json(line) + b"\n" for line in LINES)
    of = followed(folder)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(content)], strict=True):
        with (folder / "samples.jsonl").open("ab") as file:
            file.write(content[start:end])
        seen = Seen(of)
    own, details = written(folder)
    assert {name: seen.header[name] for name in own} == own
    assert seen.details == details
    assert len(seen.numbers) > 24 * 100


def test_a_version_changes_with_what_is_written_and_with_nothing_else(tmp_path):
    folder = write_dump(tmp_path, LINES[:2])
    of = followed(folder)
    versions = [Seen(of).version for _ in range(2)]
    append(folder / "samples.jsonl", LINES[2:4])
    versions += [Seen(of).version for _ in range(2)]
    append(folder / "alarms.jsonl", [{"step": 1, "alarm": "x", "event": "raised", "sentence": ""}])
    versions += [Seen(of).version for _ in range(2)]
    assert versions[0::2] == versions[1::2]
    assert len(set(versions)) == 3


def test_rotated_files_and_held_out_answers_are_read_on(tmp_path):
    folder = write_dump(tmp_path, LINES[:2])
    of = followed(folder)
    before = Seen(of)
    (folder / "samples.jsonl").rename(folder / "samples.1.jsonl")
    append(folder / "samples.1.jsonl", LINES[2:4])
    append(folder / "samples.jsonl", LINES[4:6])
    append(folder / "samples.held_out.jsonl", [held_out(0, 3)])
    after = Seen(of)
    assert (before.header["num_samples"], after.header["num_samples"]) == (2, 7)
    assert after.header["generation"] == before.header["generation"]
    assert after.header["labels"]["set"] == ["training", "held-out"]
    assert [told["input"] for told in after.details[-1:]] == ["question 1"]


def test_lines_that_a_run_takes_back_are_gone(tmp_path):
    folder = write_dump(tmp_path, LINES)
    of = followed(folder)
    before = Seen(of)
    SampleDump(folder / "samples.jsonl").cut_back(4)
    after = Seen(of)
    assert after.header["num_samples"] == 8
    assert after.header["generation"] > before.header["generation"]
    assert of.part(f"block-{before.header['generation']}-0") is None


def test_a_run_that_has_written_nothing_is_waited_for(tmp_path):
    of = followed(tmp_path)
    assert Seen(of).version == Seen(of).version
    assert Seen(of).header["num_samples"] == 0
    write_dump(tmp_path, LINES[:3])
    assert Seen(of).header["num_samples"] == 3


def test_of_a_run_that_grows_too_long_whole_groups_are_left_out(tmp_path):
    folder = write_dump(tmp_path, LINES)
    seen = Seen(followed(folder, max_samples=10))
    assert 0 < seen.header["num_samples"] <= 10
    assert seen.header["num_found"] == len(LINES)
    assert len(seen.details) == seen.header["num_samples"]


def test_where_a_sample_was_trained_is_told_when_its_step_has_ended(tmp_path):
    folder = write_dump(tmp_path, LINES[:4])
    of = followed(folder)
    before = Seen(of)
    keys = [[(0, 0, 1, 0)], [(1, 0, 0, 0)]]
    step = {
        "batch": 0,
        "ordinal": 0,
        "step": 1,
        "num_samples": 2,
        "num_tokens": 9,
        "rounds": [keys],
    }
    append(folder / "samples.steps.jsonl", [step])
    after = Seen(of)
    assert before.numbers != after.numbers
    assert [each["step"] for each in after.header["steps"]] == [1]


@contextmanager
def serving(folder):
    with PageServer(followed(folder), port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def test_the_server_answers_who_knows_the_address_and_nobody_else(tmp_path):
    with serving(write_dump(tmp_path, LINES)) as server:
        assert server.address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(server.address) as answer:
            page = answer.read().decode()
            assert "connect-src 'self'" in page and "application/gzip" not in page
            assert answer.headers["Cache-Control"] == "no-store"
        root = server.address.removesuffix(f"{server.secret}/")
        own = [
            f"{server.secret}/{name}" for name in ("etc", "../version", "block-0-99", "block-0-ü")
        ]
        for path in ("", "version", "x/version", server.secret, *own):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(root + urllib.request.quote(path))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--output", "x.html"], "--output must be left out with --follow, which writes no file"),
        (["--port", "{port}"], "--port {port} must be free, got Address already in use: "),
        ([], "RUN must be the folder of a run, or its dump, got "),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_sentence(options, expected, tmp_path):
    with serving(write_dump(tmp_path, LINES)) as server:
        run = tmp_path if options else tmp_path / "gone"
        options = [each.format(port=server.server_port) for each in options]
        result = CliRunner().invoke(main, ["rollouts", str(run), "--follow", *options])
        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: {expected.format(port=server.server_port)}")
