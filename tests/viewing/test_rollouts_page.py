import os
import re
import resource
from pathlib import Path

import pytest
from click.testing import CliRunner
from rollouts_pages import Page, held_out, sample, write, write_dump

from async_grpo.cli.main import main
from async_grpo.util.errors import DataError
from async_grpo.viewing.page import build
from async_grpo.viewing.page.cells import Words
from async_grpo.viewing.page.dump import Amount, Dump, choose

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=alert(1)>",
    "a\0b",
    "lone \udc80 surrogate",
    "\u202eright to left\u2066",
    "@CODE@ @TITLE@ @BLOCKS@ ]]> <!-- -->",
)


def test_a_page_holds_every_sample_of_the_dump_in_its_order(tmp_path):
    lines = [sample(ordinal, index) for ordinal in range(6) for index in range(2)]
    page = Page(write(write_dump(tmp_path, lines)))
    for name in ("ordinal", "index", "reward", "advantage", "num_output_tokens"):
        assert page.columns[name] == [line[name] for line in lines]
    assert page.columns["step"] == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert page.labels("fate") == ["trained"] * 12
    assert [told["output"] for told in page.details] == ["an answer"] * 12
    assert page.header["num_found"] == page.header["num_samples"] == 12


def test_held_out_samples_follow_those_of_training_with_the_step_that_they_came_after(tmp_path):
    evaluated = [held_out(batch, number) for batch in (0, 4) for number in range(3)]
    named = held_out(4, 0, set="<b>math")
    folder = write_dump(tmp_path, [sample(0), sample(9)], evaluated=[*evaluated, named])
    page = Page(write(folder))
    assert page.labels("set") == ["training"] * 2 + ["held-out"] * 6 + ["<b>math"]
    assert page.columns["step"] == [1, 5, 0, 0, 0, 4, 4, 4, 4]
    assert page.columns["ordinal"] == [0, 9, 0, 1, 2, 0, 1, 2, 0]
    assert page.header["num_found"] == 9


def test_of_a_long_dump_evaluations_keep_the_same_questions(tmp_path):
    evaluated = [held_out(batch, number) for batch in range(10) for number in range(50)]
    page = Page(write(write_dump(tmp_path, [sample(0)], evaluated=evaluated), max_samples=100))
    found = [
        [
            n
            for n, b in zip(page.columns["ordinal"], page.columns["batch"], strict=True)
            if b == batch
        ]
        for batch in range(1, 10)
    ]
    assert all(each == found[0] for each in found) and 5 <= len(found[0]) <= 15


def test_rotated_files_are_read_the_oldest_first(tmp_path):
    write_dump(tmp_path, [sample(0)])
    (tmp_path / "samples.jsonl").rename(tmp_path / "samples.1.jsonl")
    write_dump(tmp_path, [sample(1)])
    assert Page(write(tmp_path)).columns["ordinal"] == [0, 1]


@pytest.mark.parametrize(
    "tail", [b'{"batch": 1, "ordinal": 2, "att', b"no JSON\n", b'{"batch": 1, "ordinal": 2, "x"}\n',
             b'{"batch": 1, "ordinal": 2, "attempt": 0}\n', b"[" * 100_000 + b"\n"],
)  # fmt: skip
def test_what_is_no_sample_is_left_out_and_counted(tail, tmp_path):
    page = Page(write(write_dump(tmp_path, [sample(0), sample(1)], tail=tail)))
    assert (page.header["num_samples"], page.header["num_broken"]) == (2, 1)


def test_of_a_long_dump_whole_groups_are_left_out_evenly(tmp_path):
    lines = [sample(ordinal, index) for ordinal in range(1000) for index in range(4)]
    page = Page(write(write_dump(tmp_path, lines), max_samples=400))
    shown = page.columns["ordinal"]
    assert len(shown) == 400
    assert all(shown.count(ordinal) == 4 for ordinal in shown)
    gaps = [b - a for a, b in zip(sorted(set(shown)), sorted(set(shown))[1:], strict=False)]
    assert max(gaps) <= 20  # every tenth, give or take: none of the run is missing
    assert page.header["num_found"] == 4000


def test_both_limits_bind():
    assert choose(Amount(100, 1000), max_samples=100, max_bytes=250).share == 0.25
    assert choose(Amount(100, 1000), max_samples=10, max_bytes=10**6).share == 0.1


def test_hostile_texts_are_data_and_nothing_else(tmp_path):
    lines = [
        sample(n, input=text, output=text, reason=text, adapter=text, dataset_type=text)
        for n, text in enumerate(HOSTILE)
    ]  # fmt: skip
    folder = write_dump(tmp_path / "@CODE@<b>", lines)
    page = Page(write(folder))
    for n, text in enumerate(HOSTILE):
        assert page.details[n]["output"] == page.details[n]["input"] == text
    assert page.labels("adapter") == list(HOSTILE)
    for text in ("owned", "onerror", "right to left"):
        assert text not in page.text
    assert page.text.count("<script") == page.text.count("</script>") == 4 + 1
    assert "<title>@CODE@&lt;b&gt;: rollouts</title>" in page.text


def test_a_page_asks_no_network(tmp_path):
    text = write(write_dump(tmp_path, [sample(0)])).read_text()
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href|url)\s*[=(]", text)


def test_a_rewritten_page_of_the_same_dump_is_the_same_file(tmp_path):
    folder = write_dump(tmp_path, [sample(0), sample(1)])
    assert write(folder).read_bytes() == write(folder).read_bytes()


def test_texts_of_a_dump_are_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BLOCK_BYTES", 2**16)
    text = "0123456789abcdef" * 2**16  # a MiB
    folder = write_dump(tmp_path, [sample(n, input=f"{n} {text}") for n in range(64)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page = write(folder)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 40
    assert len(Page(page).header["blocks"]) == 64


class Tokenizer:
    """Joins words by spaces, and drops the first one's as sentencepiece does."""

    def decode(self, ids):
        return " ".join(f"w{each}" for each in ids)


def test_a_group_that_failed_is_shown_with_its_reason(tmp_path):
    nobody = {
        "fate": "failed", "output": "", "reward": None, "advantage": None, "verdict": "error",
        "finish_reason": None, "num_output_tokens": 0, "weights_versions": [],
        "reason": "environment mine.py:Mine raised KeyError", "stage": "environment: environment",
    }  # fmt: skip
    tokens = {"input_token_ids": [], "output_token_ids": [], "loss_mask": [], "scores": {}}
    lines = [sample(0), sample(1, **nobody), sample(2, **nobody, **tokens)]
    shown = Page(write(write_dump(tmp_path, lines), tokenizer=Tokenizer()))
    assert shown.labels("fate") == ["trained", "failed", "failed"]
    assert [told["reason"] for told in shown.details[1:]] == [nobody["reason"]] * 2


def test_pieces_joined_are_the_text():
    ids = [3, 1, 2]
    assert Words(Tokenizer())(ids) == ["w3", " w1", " w2"]
    assert Words(None)(ids) == ["⟨3⟩", "⟨1⟩", "⟨2⟩"]


def test_tokens_lie_beside_their_row(tmp_path):
    columns = {
        "output_token_ids": [5, 6], "loss_mask": [True, False], "reference_logprobs": None,
        "behaviour_logprobs": [-0.5, -1.25], "scores": {}, "weights_versions": [["7.3", 0, 2]],
    }  # fmt: skip
    turns = [
        {"role": "model", "row": row, "text": "", "num_tokens": 2, "weights_versions": []}
        for row in (0, 1)
    ]
    two = {name: [value, value] for name, value in columns.items() if isinstance(value, list)}
    lines = [sample(0, **columns), sample(1, turns=turns, **(columns | two))]
    folder = write_dump(tmp_path, lines)
    one_row, two_rows = (
        told["rows"] for told in Page(write(folder, tokenizer=Tokenizer())).details
    )
    assert one_row == two_rows[:1]
    assert one_row[0] == {
        "tokens": ["w5", " w6"], "mask": "10", "behaviour": [-0.5, -1.25], "reference": None,
        "teacher": None, "versions": [["7.3", 0, 2]],
    }  # fmt: skip
    assert len(two_rows) == 2


@pytest.mark.parametrize("name", ["", "nothing.jsonl"])
def test_a_run_without_a_dump_is_refused_by_name(name, tmp_path):
    with pytest.raises(DataError, match=r"no samples in .*: give the folder of a run"):
        write_page_of(tmp_path / name)


def write_page_of(run):
    build.write_page(
        run, Path("never.html"), max_samples=9, max_mib=9, find_tokenizer=lambda _: None
    )


def test_a_dump_of_other_lines_is_refused(tmp_path):
    with pytest.raises(DataError, match="must hold samples, got no line that is one: "):
        write_page_of(write_dump(tmp_path, [{"question": 3}]))


def test_the_command_writes_the_page_beside_the_dump(tmp_path):
    folder = write_dump(tmp_path, [sample(n) for n in range(10)], tail=b"{")
    result = CliRunner().invoke(main, ["rollouts", str(folder), "--max-samples", "5"])
    assert result.exit_code == 0, result.output
    assert re.fullmatch(
        r"wrote \S+/rollouts.html \(4 samples, 0.1 MiB, 6 left out: see --max-samples and "
        r"--max-mib, 1 broken lines\)\n",
        result.output,
    )
    assert (folder / "rollouts.html").exists()


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    folder = write_dump(tmp_path, [sample(0)])
    result = CliRunner().invoke(main, ["rollouts", str(folder), "-o", f"{tmp_path}/no/x.html"])
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: cannot write {tmp_path}/no/x.html (No such file or directory): choose another "
        "--output\n"
    )


def test_a_tokenizer_that_is_gone_leaves_numbers_and_asks_no_hub(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    columns = {
        "output_token_ids": [5], "loss_mask": [True], "reference_logprobs": None,
        "behaviour_logprobs": [-0.5], "scores": {}, "weights_versions": [["7.3", 0, 1]],
    }  # fmt: skip
    folder = write_dump(tmp_path, [sample(0, **columns)], model_name_or_path=f"{tmp_path}/gone")
    result = CliRunner().invoke(main, ["rollouts", str(folder)])
    assert (result.exit_code, os.environ["HF_HUB_OFFLINE"]) == (0, "1")
    assert "tokens are shown as numbers (--tokenizer FOLDER names another)" in caplog.text
    assert Page(folder / "rollouts.html").details[0]["rows"][0]["tokens"] == ["⟨5⟩"]
    result = CliRunner().invoke(main, ["rollouts", str(folder), "--tokenizer", f"{tmp_path}/no"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: --tokenizer {tmp_path}/no cannot be loaded: ")


def test_the_newest_samples_are_printed_as_a_table_without_what_a_terminal_obeys(tmp_path):
    lines = [sample(number, output=f"output {number}") for number in range(9)]
    lines[8]["output"] = "\x1b[31mred [bold]as it is[/bold]"
    lines[7]["given"] = True  # a reference answer, say: nobody sampled it
    run = write_dump(
        tmp_path / "run", lines, tail=b'{"batch": 9, "ordi', evaluated=[held_out(3, 1)]
    )
    done = CliRunner().invoke(main, ["rollouts", str(run), "--print", "3"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    found = [number for number in range(9) if f"output {number}" in done.output]
    assert found == [6, 7] and "question 8" in done.output
    assert [
        line.split("│")[4].strip()
        for line in done.output.splitlines()
        if ("│" in line and "output" in line) or "[bold]" in line
    ] == ["stop", "given", "stop"]
    assert "[bold]as it is[/bold]" in done.output and "\x1b" not in done.output
    assert not (run / "rollouts.html").exists()


def test_of_a_large_dump_its_end_is_read(tmp_path):
    run = write_dump(tmp_path, [sample(number) for number in range(9)])
    half = (run / "samples.jsonl").stat().st_size // 2
    found = Dump(run).newest(9, num_bytes=half)
    assert [line["ordinal"] for line in found] == [5, 6, 7, 8]
