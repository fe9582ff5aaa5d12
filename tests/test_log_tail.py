import os

from async_grpo.log_tail import READ_BYTES, tail, tail_of_process


def test_the_errors_of_the_process_are_found_and_cleaned_of_marks(tmp_path):
    (tmp_path / "worker-aa-01000000-71.out").write_text("said\n")
    (tmp_path / "worker-aa-01000000-7.out").write_text("said by 7\n")
    error = tmp_path / "worker-aa-01000000-7.err"
    error.write_text(":job_id:01000000\n:actor_name:Worker\n\nTraceback\nValueError: x\n")
    assert tail_of_process(tmp_path, pid=7).lines == ("Traceback", "ValueError: x")
    error.write_text(":job_id:01000000\n")
    assert tail_of_process(tmp_path, pid=7).lines == ("said by 7",)
    assert tail_of_process(tmp_path, pid=17) is None


def test_of_two_processes_with_one_pid_the_younger_is_meant(tmp_path):
    for name, age_s in (("worker-bb-01000000-7.err", 10), ("worker-aa-02000000-7.err", 1000)):
        (tmp_path / name).write_text(f"{age_s}\n")
        os.utime(tmp_path / name, (10**9 - age_s, 10**9 - age_s))
    assert tail_of_process(tmp_path, pid=7).lines == ("10",)


def test_only_whole_lines_of_the_end_of_a_large_log_are_read(tmp_path):
    (tmp_path / "log").write_bytes(b"x" * (READ_BYTES + 10) + b"\nlast \xff\n")
    assert tail(tmp_path / "log") == ("last \ufffd",)
    (tmp_path / "log").write_text("\n".join(map(str, range(100))))
    assert tail(tmp_path / "log", num_lines=3) == ("97", "98", "99")
