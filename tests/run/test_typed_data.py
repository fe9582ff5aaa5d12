"""Several data files: what a run reads of them, and what its slots are."""

import json
from collections import Counter
from pathlib import Path

import pytest
from scripted_run import make_config

from async_grpo.batching.ledger import Ledger
from async_grpo.cli.train import check_at_once
from async_grpo.model.model_folder import check_model_folder
from async_grpo.run.data import first_of_each_file, load_data, load_sets
from async_grpo.run.preparation import own_environments, plan_run
from async_grpo.types import ResumePoint
from async_grpo.util.errors import ConfigError, DataError

MODEL = str(Path(__file__).parents[2] / "sample-data" / "tiny-countdown")


@pytest.fixture
def files(tmp_path):
    """A file of 5 sums, whose prompts have a name of their own, and one of 3 products."""
    write(tmp_path / "sums.jsonl", [{"q": f"use {n} 2 to make 3\n"} for n in range(1, 6)])
    products = [{"input": f"use {n} 3 to make 6\n"} for n in range(1, 4)]
    write(tmp_path / "products.jsonl", products)
    write(tmp_path / "held_out.jsonl", [{"q": "use 9 2 to make 3\n"}])
    return tmp_path


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def typed_config(files, *, of_sums="", of_products="", **options):
    data = (
        f"sums={files}/sums.jsonl,weight=2,input=q,eval_path={files}/held_out.jsonl{of_sums};"
        f"products={files}/products.jsonl{of_products}"
    )
    return make_config(
        **{"model_name_or_path": MODEL, "data_path": "", "data": data, "batch_size": 4} | options,
        output_dir=str(files / "run"),
    )


def planned(config, **options):
    facts = check_model_folder(MODEL)
    return plan_run(config, facts, *load_data(config, facts), num_ranks=1, **options)


def test_every_line_is_of_its_file_s_type_and_every_batch_has_its_shares(files):
    config = typed_config(files, batch_size=6)
    plan = planned(config)
    assert [q.dataset_type for q in plan.questions] == ["sums"] * 5 + ["products"] * 3
    assert [q.dataset_type for q in plan.held_out] == ["sums"]
    slots = [plan.draw(ordinal, attempt=0)[0] for ordinal in range(30)]
    for batch in range(5):
        kinds = Counter(q.dataset_type for q in slots[6 * batch : 6 * batch + 6])
        assert kinds == {"sums": 4, "products": 2}
    for kind, size in (("sums", 5), ("products", 3)):  # whole epochs, each type for itself
        own = [q.input for q in slots if q.dataset_type == kind]
        assert {len(set(own[n : n + size])) for n in range(0, len(own) - size, size)} == {size}
    again = plan.draw(0, attempt=1)[0]
    assert again.dataset_type == slots[0].dataset_type


def test_a_run_that_goes_on_asks_what_it_would_have_asked(files):
    config = typed_config(files)
    whole = planned(config)
    point = ResumePoint(2, 0, Ledger().state())
    rest = planned(config, resume=point)
    for ordinal in (11, 8, 9, 10, 15):
        for attempt in (0, 1):
            expected = whole.draw(ordinal, attempt=attempt)[0].input
            assert rest.draw(ordinal, attempt=attempt)[0].input == expected


def test_one_file_is_read_in_the_order_that_it_always_was(files):
    write(files / "one.jsonl", [{"input": f"use {n} 2 to make 3\n"} for n in range(1, 6)])
    options = {"model_name_or_path": MODEL, "infinite_sampler_seed": 3}
    plain = planned(make_config(data_path=f"{files}/one.jsonl", **options))
    typed = planned(make_config(data_path="", data=f"a={files}/one.jsonl", **options))
    for plan in (plain, typed):
        inputs = [plan.draw(ordinal, attempt=0)[0].input[4] for ordinal in range(10)]
        assert "".join(inputs) == "1524324315"
        replaced = [plan.draw(7, attempt=n)[0].input[4] for n in (1, 2, 3)]
        assert "".join(replaced) == "115"


def test_a_line_that_says_another_type_than_its_file_is_refused(files):
    with (files / "products.jsonl").open("a") as file:
        file.write(json.dumps({"input": "use 1 2\n", "dataset_type": "sums"}) + "\n")
    said = r"products.jsonl line 4, column 'dataset_type': expected a type of --data \(products\), "
    with pytest.raises(DataError, match=said):
        planned(typed_config(files))


def test_held_out_lines_of_all_types_say_which_they_are(files):
    held_out = files / "all.jsonl"
    write(held_out, [{"input": "use 1 2\n", "dataset_type": "products"}])
    plan = planned(typed_config(files, eval_data_path=str(held_out)))
    assert [q.dataset_type for q in plan.held_out] == ["sums", "products"]
    write(held_out, [{"input": "use 1 2\n"}])
    with pytest.raises(
        DataError, match=r"all.jsonl line 1, column 'dataset_type': expected a type"
    ):
        planned(typed_config(files, eval_data_path=str(held_out)))


def test_a_file_that_is_not_there_is_refused_naming_its_type(files):
    (files / "products.jsonl").unlink()
    with pytest.raises(DataError, match="--data of products must be an existing file or folder"):
        check_at_once(typed_config(files))


def test_a_column_that_a_file_lacks_is_refused_at_once(files):
    with pytest.raises(DataError, match=r"products.jsonl line 1, column 'nope': expected what"):
        check_at_once(typed_config(files, of_products=",answer=nope"))


def test_a_type_s_own_environment_plays_it_and_the_run_s_plays_the_others(files):
    (files / "mine.py").write_text("class Mine: ...")
    name = f"{files}/mine.py:Mine"
    config = typed_config(files, of_products=f",environment={name}")
    plan = planned(config)
    slots = [plan.draw(ordinal, attempt=0) for ordinal in range(3)]
    asked = [plan.episodes_request(*slot, None) for slot in slots]
    played = [a.environment.name if a else "" for a in asked]
    kinds = [question.dataset_type for question, _ in slots]
    assert played == [name if kind == "products" else "" for kind in kinds]
    with pytest.raises(ConfigError, match="environment of --data sums must be single_turn"):
        own_environments(typed_config(files, of_sums=",environment=nothing"))


def test_rewards_are_tried_on_the_first_line_of_each_file(files):
    config = typed_config(files)
    questions, _ = load_data(config, check_model_folder(MODEL))
    first = first_of_each_file(config, questions)
    assert [(q.dataset_type, q.input) for q in first] == [
        ("sums", "use 1 2 to make 3\n"),
        ("products", "use 1 3 to make 6\n"),
    ]


def test_a_named_set_has_its_own_file_columns_limit_room_and_type(files):
    write(files / "math.jsonl", [{"question": f"use {n} 2 to make 3\n"} for n in range(1, 9)])
    sets = f"math={files}/math.jsonl,limit=3,samples=2,max_tokens=9,input=question,type=products"
    config = typed_config(files, eval=sets, eval_data_path="")
    facts = check_model_folder(MODEL)
    plan = planned(config, sets=load_sets(config, facts))
    unnamed, math = plan.sets
    assert (unnamed.config.name, len(unnamed.questions)) == ("", 1)
    assert [q.input for q in math.questions] == [f"use {n} 2 to make 3\n" for n in (1, 2, 3)]
    assert {q.dataset_type for q in math.questions} == {"products"}
    assert (math.config.samples, math.sampling.max_tokens) == (2, 9)
    assert math.sampling.stop_token_ids == plan.sampling.stop_token_ids
    longest = facts.max_positions - 5
    with pytest.raises(DataError, match=r"a prompt of at most 5 tokens"):
        load_sets(typed_config(files, eval=f"{sets.replace('=9', f'={longest}')}"), facts)
