"""What `--data` means, and in which words it is refused."""

import pytest
from scripted_run import make_config

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.data_files import DATA_FILES, as_text, data_file
from async_grpo.util.errors import ConfigError

TAUGHT = {"data_path": "", "gkd_coefficient": 1.0}


def test_what_is_typed_and_what_a_table_says_are_the_same():
    table = {
        "type": "sums",
        "path": "s.jsonl",
        "weight": 0.5,
        "environment": "mine.py:Mine",
        "rewards": ["a", "mine.py:b"],
        "teacher": "big",
        "eval_path": "h.jsonl",
        "split": "test",
        "config": "main",
        "column_mapping": "input=question",
    }
    file = data_file(as_text(table))
    assert (file.type, file.weight, file.environment) == ("sums", 0.5, "mine.py:Mine")
    assert (file.rewards, file.teacher) == (("a", "mine.py:b"), "big")
    assert (file.source.path, file.source.split, file.source.config) == ("s.jsonl", "test", "main")
    assert (file.held_out.path, file.held_out.split) == ("h.jsonl", "test")
    assert file.columns == {"input": "question"}


@pytest.mark.parametrize("option", ["1,2", "'1;2, 3'", 'it"s;', "plain"])
def test_the_command_of_an_agent_may_hold_what_parts_are_told_apart_by(option):
    command = f"agent:python agent.py --option={option}"
    table = {"type": "sums", "path": "a,b.jsonl", "environment": command, "weight": 2}
    other = {"type": "odes", "path": "o.jsonl"}
    sums, odes = DATA_FILES.records(";".join(map(as_text, (table, other))))
    assert (sums.environment, sums.source.path, sums.weight) == (command, "a,b.jsonl", 2.0)
    assert (odes.type, odes.environment) == ("odes", "")
    typed = data_file("sums=s.jsonl,environment=agent:python agent.py '1,2',weight=2")
    assert (typed.environment, typed.weight) == ("agent:python agent.py '1,2'", 2.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sums.jsonl", "--data must be TYPE=PATH,key=value,..., got 'sums.jsonl'"),
        ("a=b,weight=", "--data must be TYPE=PATH,key=value,..., got 'a=b,weight='"),
        ("a=b,weight=-1", "--data of a must have a positive weight, got '-1'"),
        ("a=b,weight=0", "--data of a must have a positive weight, got '0'"),
        ("a=b,weight=nan", "--data of a must have a positive weight, got 'nan'"),
        ("a=b,weight=inf", "--data of a must have a positive weight, got 'inf'"),
        ("a=b,weight=much", "--data of a must have a positive weight, got 'much'"),
        ("a=b,weight=1,weight=2", "--data must give a key once"),
        ("a=b,reward=c", "--data of a has an unknown key, got 'reward'"),
        ("a/b=c", "--data must have a type of letters, digits, . _ and -, got 'a/b'"),
        ("a=b;c=d;a=e", "--data must have one file for each type, got 'a'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_rule_the_value_and_the_remedy(text, said):
    with pytest.raises(ConfigError) as caught:
        make_config(data_path="", data=text)
    assert str(caught.value).startswith(said)
    assert ": " in str(caught.value).removeprefix(said)


@pytest.mark.parametrize("options", [{"data_path": ""}, {"data": "a=b"}])
def test_a_run_has_one_file_or_several_with_types_and_not_both(options):
    with pytest.raises(ConfigError, match="--data-path must be given, or --data for each of"):
        make_config(**options)


def test_a_type_s_teacher_stands_with_its_file_or_in_teacher_for():
    config = make_config(data="a=b,teacher=big;c=d", teacher_for="small", **TAUGHT)
    assert config.teacher_routes == {"": "small", "a": "big"}
    find_algorithm(config)
    with pytest.raises(ConfigError, match="--teacher-for must name one teacher for each type"):
        find_algorithm(make_config(data="a=b,teacher=big", teacher_for="a=small", **TAUGHT))
    with pytest.raises(ConfigError, match="--data names a teacher that nobody uses"):
        find_algorithm(make_config(data="a=b,teacher=big", data_path=""))


def test_environment_and_rewards_are_the_type_s_own_or_those_of_all():
    config = make_config(
        data_path="", environment="mine.py:A", data="a=b,environment=single_turn,rewards=x+y;c=d"
    )
    assert config.environments == {"single_turn", "mine.py:A"}
    assert (config.data.rewards_of("a"), config.data.rewards_of("c")) == (("x", "y"), ())


def test_supervised_training_takes_one_file():
    config = make_config(data_path="", data="a=b", algorithm="sft")
    with pytest.raises(ConfigError, match="--data needs an algorithm that samples outputs"):
        find_algorithm(config)


def test_columns_have_types_where_a_file_says_so():
    file = data_file("sums=s.csv,columns='x=int,y=float',eval_path=e.csv")
    assert file.source.columns == {"x": "int", "y": "float"}
    assert file.held_out is not None and file.held_out.columns == file.source.columns
    with pytest.raises(ConfigError, match="--data must hold pairs of a column and its type"):
        data_file("sums=s.csv,columns=x=integer")
