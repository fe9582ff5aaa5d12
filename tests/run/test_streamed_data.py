"""--data-order window: what a run makes of lines that stay in their files."""

import json
import pickle
from collections import Counter
from pathlib import Path

import pytest
from scripted_run import make_config

from async_grpo.check.data_read import read_data
from async_grpo.check.finding import Setup
from async_grpo.checkpoint.resume import Start
from async_grpo.model.model_folder import check_model_folder
from async_grpo.run.data import check_types, first_of_each_file, load_data, load_pairs, order_of
from async_grpo.run.preparation import demand_of, hash_contents, plan_run
from async_grpo.util.errors import ConfigError, DataError

MODEL = str(Path(__file__).parents[2] / "sample-data" / "tiny-countdown")
LINES = [{"input": f"use {n} 2 to make 3\n"} for n in range(1, 10)]
PAIRS = [line | {"completion": "1 + 2"} for line in LINES]
FACTS = check_model_folder(MODEL)


@pytest.fixture
def shards(tmp_path):
    """Nine questions in three files."""
    for number in range(3):
        write(tmp_path / f"part-{number}.jsonl", LINES[3 * number : 3 * number + 3])
    return tmp_path


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def config_of(folder, **options):
    given = {"data_path": f"{folder}/part-*.jsonl", "data_order": "window", "data_window": 2}
    return make_config(
        **given | {"model_name_or_path": MODEL, "batch_size": 4, "output_dir": f"{folder}/run"},
        **options,
    )


def planned(config):
    return plan_run(config, FACTS, *load_data(config, FACTS), num_ranks=1)


def inputs(plan, ordinals):
    return [plan.draw(ordinal, attempt=0)[0].input for ordinal in ordinals]


def test_the_batcher_s_process_asks_each_line_once_an_epoch(shards):
    plan = planned(config_of(shards))
    there = pickle.loads(pickle.dumps(plan.questions)), pickle.loads(pickle.dumps(plan.order))
    for epoch in (0, 1):
        ordinals = range(9 * epoch, 9 * epoch + 9)
        asked = inputs(plan, ordinals)
        assert sorted(asked) == [line["input"] for line in LINES]
        assert [there[0][there[1](ordinal)].input for ordinal in ordinals] == asked
    assert inputs(plan, [13, 4]) == [inputs(plan, range(18))[ordinal] for ordinal in (13, 4)]


def test_files_of_several_types_keep_their_shares_and_their_windows(shards):
    data = f"ones={shards}/part-0.jsonl,weight=3;twos={shards}/part-[12].jsonl"
    config = config_of(shards).but(data_path="", data=data)
    plan = planned(config)
    kinds = [plan.draw(ordinal, attempt=0)[0].dataset_type for ordinal in range(16)]
    assert [kinds[n : n + 4].count("twos") for n in range(0, 16, 4)] == [1, 1, 1, 1]
    assert plan.type_of(0) == kinds[0] == plan.draw(0, attempt=1)[0].dataset_type
    firsts = first_of_each_file(config, plan.questions)
    assert [(each.dataset_type, each.input) for each in firsts] == [
        ("ones", LINES[0]["input"]), ("twos", LINES[3]["input"]),
    ]  # fmt: skip


def test_a_line_that_is_met_later_is_left_out_and_counted(shards):
    lines = [LINES[0]] * 1000 + [LINES[6], {"input": "much too long " * 300}, LINES[8]]
    write(shards / "many.jsonl", lines)
    config = config_of(shards).but(data_path=f"{shards}/many.jsonl", data_window=1000)
    plan = planned(config)
    asked = Counter(inputs(plan, range(1003)))
    assert asked == {LINES[0]["input"]: 1000, LINES[6]["input"]: 1, LINES[8]["input"]: 2}
    assert (plan.take_refused(), plan.take_refused()) == (1, 0)
    questions, take_refused = pickle.loads(pickle.dumps((plan.questions, plan.take_refused)))
    assert (take_refused(), questions[1001].input, take_refused()) == (0, LINES[8]["input"], 1)


def test_questions_to_train_on_have_reference_answers_and_held_out_ones_none(shards):
    write(shards / "pairs.jsonl", PAIRS)
    config = config_of(shards, use_ref_answers=True, eval_data_path=f"{shards}/pairs.jsonl")
    for order in ("window", "index"):
        config = config.but(data_path=f"{shards}/pairs.jsonl", data_order=order)
        questions, held_out = load_data(config, FACTS)
        assert all(each.reference == "1 + 2" for each in questions)
        assert all(each.reference_token_ids is None for each in held_out)


def test_a_check_reads_the_lines_that_a_run_checks_before_it_starts(shards):
    good = [{**LINES[0], "n": number} for number in range(1000)]
    config = config_of(shards).but(data_path=f"{shards}/many.jsonl")
    write(shards / "many.jsonl", [*good, {"no": "input"}])
    (read,) = read_data(Setup(train=config), FACTS)
    assert (read.num_lines, read.problem, read.is_whole) == (1000, None, False)
    write(shards / "many.jsonl", [*good[:-1], {"no": "input"}, good[0]])
    (read,) = read_data(Setup(train=config), FACTS)
    assert "line 1000, column 'input': expected non-empty text" in str(read.problem)


def test_a_prompt_is_at_most_as_long_as_the_option_says(shards):
    config = config_of(shards, max_prompt_tokens=3)
    with pytest.raises(DataError, match="expected a prompt of at most 3 tokens"):
        load_data(config, FACTS)


def test_workers_must_serve_the_longest_prompt_that_may_come(shards):
    config = config_of(shards, max_tokens_per_gpu=60, max_generation_tokens=20)
    assert demand_of(config, FACTS, planned(config)).longest_prompt == 40
    config = config.but(max_prompt_tokens=30)
    assert demand_of(config, FACTS, planned(config)).longest_prompt == 30


def test_a_run_that_goes_on_reads_the_same_bytes_wherever_they_lie(shards, tmp_path):
    def digest(config):
        questions, _ = load_data(config, FACTS)
        return hash_contents(config, FACTS, questions, start=Start()).result()["data"]

    first = digest(config_of(shards))
    moved = shards / "elsewhere"
    moved.mkdir()
    for number in range(3):
        (moved / f"part-{number}.jsonl").write_bytes((shards / f"part-{number}.jsonl").read_bytes())
    assert digest(config_of(moved)) == first
    write(moved / "part-1.jsonl", [LINES[3], LINES[3], LINES[5]])
    assert digest(config_of(moved)) != first


def test_pairs_of_a_supervised_run_stay_in_their_files_too(shards):
    write(shards / "pairs.jsonl", PAIRS)
    config = config_of(shards, algorithm="sft").but(data_path=f"{shards}/pairs.jsonl")
    pairs, held_out = load_pairs(config, FACTS)
    order = order_of(config, pairs)
    prompts = {pairs[order.index(ordinal)].prompt_token_ids.tobytes() for ordinal in range(9)}
    assert len(prompts) == len(pairs) == 9 and not held_out


def test_a_pattern_is_read_into_memory_too(shards):
    plan = planned(config_of(shards).but(data_order="index"))
    assert [each.input for each in plan.questions] == [line["input"] for line in LINES]
    with pytest.raises(DataError, match="must be an existing file or folder"):
        load_data(config_of(shards).but(data_path=f"{shards}/none-*.jsonl"), FACTS)


def test_a_pattern_of_files_that_prepare_makes_is_not_looked_for_before(shards):
    prepare = (("make.py", "--output", f"{shards}/made-0.jsonl"),)
    setup = Setup(train=config_of(shards), workers=(), prepare=prepare)
    assert setup.is_prepared(f"{shards}/made-*.jsonl")
    assert not setup.is_prepared(f"{shards}/part-*.jsonl")
    write(shards / "made-0.jsonl", LINES)
    assert not setup.is_prepared(f"{shards}/made-*.jsonl")


def test_teachers_of_types_need_a_file_for_each_type(shards):
    routed = {"teacher_for": "sums=one", "gkd_coefficient": 1.0}
    config = config_of(shards, **routed)
    with pytest.raises(ConfigError, match=r"must have a file for each type.*--teacher-for sums"):
        check_types(config, load_data(config, FACTS)[0], ())
    config = config.but(data_path="", data=f"sums={shards}/part-*.jsonl")
    check_types(config, load_data(config, FACTS)[0], ())
