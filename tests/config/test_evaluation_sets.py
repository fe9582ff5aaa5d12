"""What `--eval` means, when a set is due, and in which words it is refused."""

import pytest
from scripted_run import make_config

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.command_options import EvaluateConfig
from async_grpo.config.data_files import as_text
from async_grpo.config.evaluation_sets import evaluation_set
from async_grpo.util.errors import ConfigError


def test_what_is_typed_and_what_a_table_says_are_the_same():
    table = {
        "name": "math", "path": "m.jsonl", "samples": 16, "k": [1, 4, 16], "temperature": 0.6,
        "top_p": 0.95, "max_tokens": 99, "rewards": ["a", "mine.py:b"], "environment": "mine.py:M",
        "every": 5, "limit": 50, "seed": 7, "type": "sums", "split": "test", "config": "main",
        "column_mapping": "input=question",
    }  # fmt: skip
    found = evaluation_set(as_text(table, option_name="eval", name="name"))
    assert (found.name, found.samples, found.ks, found.pass_ks) == ("math", 16, *[(1, 4, 16)] * 2)
    assert (found.temperature, found.top_p, found.max_tokens) == (0.6, 0.95, 99)
    assert (found.rewards, found.environment) == (("a", "mine.py:b"), "mine.py:M")
    assert (found.every, found.limit, found.seed, found.type) == (5, 50, 7, "sums")
    source = found.source
    assert (source.path, source.split, source.config) == ("m.jsonl", "test", "main")
    assert found.columns == {"input": "question"}


def test_a_set_is_due_by_its_interval_or_the_run_s_and_first_and_last():
    config = make_config(
        num_training_batches=7, eval_data_path="h", eval_every_batches=3,
        eval="a=a.jsonl,every=2;b=b.jsonl,every=0",
    )  # fmt: skip
    due = {
        found.name: [batch for batch in range(8) if config.evaluates(found, batch)]
        for found in config.evaluation_sets
    }
    assert due == {"": [0, 3, 6, 7], "a": [0, 2, 4, 6, 7], "b": [0, 7]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("m.jsonl", "--eval must be NAME=PATH,key=value,..., got 'm.jsonl'"),
        ("a=a.jsonl;a=b.jsonl", "--eval must have one entry for each set, got 'a'"),
        ("a=a.jsonl,sample=3", "--eval of a has an unknown key, got 'sample': choose from samples"),
        ("a=a.jsonl,samples=x", "--eval of a: samples must be a whole number, got 'x'"),
        ("a=a.jsonl,samples=2,k=1+3", r"--eval of a: k must be from 1 to the samples of a .*\(2\)"),
        ("a=a.jsonl,temperature=0", "--eval of a: samples must be 1 at temperature 0"),
        ("a=a.jsonl,top_p=0", "--eval of a: top_p must be above 0 and at most 1, got 0.0"),
        ("a=a.jsonl,limit=-1", "--eval of a: limit must not be negative, got -1: 0: all"),
    ],
)
def test_a_set_that_cannot_be_meant_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        make_config(eval=text)


def test_sets_and_types_are_told_apart():
    data = {"data_path": "", "data": "sums=s.jsonl;odes=o.jsonl"}
    with pytest.raises(ConfigError, match="--eval must not name a set as a type of --data"):
        make_config(eval="sums=a.jsonl", **data)
    with pytest.raises(ConfigError, match="of a must have a type of --data, got 'x': choose from"):
        make_config(eval="a=a.jsonl,type=x", **data)
    assert make_config(eval="a=a.jsonl,type=odes", **data).evaluation.eval[0].type == "odes"


def test_pairs_are_no_questions_to_sample():
    with pytest.raises(ConfigError, match="--eval needs an algorithm that samples outputs"):
        find_algorithm(make_config(eval="a=a.jsonl", algorithm="sft"))


def test_an_evaluation_alone_names_its_own_options():
    with pytest.raises(ConfigError, match=r"^--k must be from 1 to the samples"):
        EvaluateConfig(k="1+8")
    with pytest.raises(ConfigError, match=r"^--k must be numbers with [+] between them, got 'x'"):
        EvaluateConfig(k="x")
    with pytest.raises(ConfigError, match=r"^--samples must be 1 at temperature 0"):
        EvaluateConfig(temperature=0.0)
    assert EvaluateConfig(samples=8, k="8+1").set_of("d").pass_ks == (1, 8)


def test_the_best_checkpoint_is_told_by_a_figure_that_is_measured():
    sets = {"eval": "math=m.jsonl,samples=8", "eval_data_path": "h"}
    for name, found in (("eval_reward", ""), ("eval_pass_at_8/math", "math")):
        assert make_config(keep_best_checkpoint=name, **sets).best_set.name == found
    for name in ("accuracy", "eval_pass_at_8", "eval_failed", "eval_accuracy/maths"):
        with pytest.raises(
            ConfigError, match=r"of which more is better, got .*eval_pass_at_8/math"
        ):
            make_config(keep_best_checkpoint=name, **sets)
    with pytest.raises(ConfigError, match="add --eval-data-path or --eval"):
        make_config(keep_best_checkpoint="eval_accuracy")
    with pytest.raises(ConfigError, match="must be positive with --keep-best-checkpoint"):
        make_config(keep_best_checkpoint="eval_reward", checkpoint_every_batches=0, **sets)
