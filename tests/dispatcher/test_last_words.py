from async_grpo.dispatcher.last_words import LastWords, first_error, last_words

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
