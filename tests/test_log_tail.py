import os

from async_grpo.util.log_tail import READ_BYTES, LastWords, first_error, last_words, tail


def test_the_errors_of_the_process_are_found_and_cleaned_of_marks(tmp_path):
    (tmp_path / "worker-aa-01000000-71.out").write_text("said\n")
    (tmp_path / "worker-aa-01000000-7.out").write_text("said by 7\n")
    error = tmp_path / "worker-aa-01000000-7.err"
    error.write_text(":job_id:01000000\n:actor_name:Worker\n\nTraceback\nValueError: x\n")
    assert last_words(tmp_path, pid=7).lines == ("Traceback", "ValueError: x")
    error.write_text(":job_id:01000000\n")
    assert last_words(tmp_path, pid=7).lines == ("said by 7",)
    assert last_words(tmp_path, pid=17) == LastWords()


def test_of_two_processes_with_one_pid_the_younger_is_meant(tmp_path):
    for name, age_s in (("worker-bb-01000000-7.err", 10), ("worker-aa-02000000-7.err", 1000)):
        (tmp_path / name).write_text(f"{age_s}\n")
        os.utime(tmp_path / name, (10**9 - age_s, 10**9 - age_s))
    assert last_words(tmp_path, pid=7).lines == ("10",)


def test_only_whole_lines_of_the_end_of_a_large_log_are_read(tmp_path):
    (tmp_path / "log").write_bytes(b"x" * (READ_BYTES + 10) + b"\nlast \xff\n")
    assert tail(tmp_path / "log", num_lines=9) == ("last \ufffd",)
    (tmp_path / "log").write_text("\n".join(map(str, range(100))))
    assert tail(tmp_path / "log", num_lines=3) == ("97", "98", "99")


MARK = "(EngineCore pid=3272) ERROR 11-21 15:58:27 [core.py:1510]"
ENGINE = f"""\
:actor_name:GenerationWorker
Loading safetensors checkpoint shards: 100%|#########| 1/1
INFO an error: of no consequence
{MARK} Traceback (most recent call last):
{MARK}   File "/vllm/core.py", line 1510, in run_engine_core
{MARK}     raise ValueError(
{MARK} ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_engines_first_error_is_told_and_not_what_it_led_to(tmp_path):
    (tmp_path / "worker-ab-01-3031.err").write_text(ENGINE)
    words = last_words(tmp_path, pid=3031)
    assert words.error == "ValueError: No available memory for the cache blocks."
    assert words.sentence == f": {words.error} (all of it in {words.path})"
    assert words.lines[-1].startswith("RuntimeError: Engine core")
    assert not any("100%" in line for line in words.lines)


def test_a_qualified_error_is_one_and_prose_is_none():
    assert (
        first_error(["torch.cuda.OutOfMemoryError: 3 GiB"]) == "torch.cuda.OutOfMemoryError: 3 GiB"
    )
    assert (
        first_error(["  ValueError: quoted source", "an Error: in a sentence", "Errors: 3"]) == ""
    )


def test_a_process_that_left_no_log_has_no_last_words(tmp_path):
    assert last_words(tmp_path, pid=7) == LastWords() == last_words(tmp_path, pid=0)
    assert LastWords().sentence == ""
    (tmp_path / "worker-ab-01-8.err").write_text("all is well\n")
    assert last_words(tmp_path, pid=8).sentence == f" (all of it in {tmp_path}/worker-ab-01-8.err)"
