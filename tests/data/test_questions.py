import json

import pytest

from async_grpo.config.data_files import DataSource
from async_grpo.data.lines import load_records
from async_grpo.data.questions import LineReader, parse_column_mapping
from async_grpo.data.table import GivenTable, PairTable, QuestionTable
from async_grpo.util.errors import ConfigError, DataError


class LetterTokenizer:
    """One token a letter: a=10, b=11 ..., and 2 closes a text."""

    eos_token = "<eos>"
    eos_token_id = 2
    chat_template = None

    def __init__(self, *, closes_texts=False):
        self.closes_texts = closes_texts

    def __len__(self):
        return 100

    def __call__(self, text, add_special_tokens=True):
        closing = [2] if self.closes_texts and add_special_tokens else []
        return {"input_ids": [ord(letter) - 87 for letter in text] + closing}

    def decode(self, ids, *, skip_special_tokens=False):
        kept = [token for token in ids if not (skip_special_tokens and token == 2)]
        return "".join(chr(token + 87) for token in kept)


class ChatTokenizer(LetterTokenizer):
    """Role initials around each message, 5 where the assistant begins."""

    chat_template = "yes"

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, return_dict):
        assert add_generation_prompt and tokenize and not return_dict
        return [t for m in messages for t in (4, *self(m["content"])["input_ids"])] + [5]


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        return str(path)

    return write


def load(table, record, path, *, split="train", config="", types=None, **options):
    reader = LineReader(
        **{"tokenizer": LetterTokenizer(), "vocab_size": 100, "max_tokens": 1000} | options
    )
    source = DataSource(path, split, config, types or {})
    return table.of(load_records(source, getattr(reader, record)))


def load_questions(path, **options):
    return load(QuestionTable, "question", path, **options)


def load_pairs(path, **options):
    return load(PairTable, "pair", path, **options)


def load_one(path, **options):
    (question,) = load_questions(path, **options)
    return question


def error_of(path, **options):
    with pytest.raises(DataError) as error:
        load_questions(path, **options)
    return str(error.value).replace(path, "data.jsonl")


def test_token_ids_are_taken_as_they_are_and_win_over_text(write):
    line = {"input": "abc", "input_token_ids": [7, 8], "answer": "x"}
    question = load_one(write(line), tokenizer=ChatTokenizer())
    assert question.input_token_ids.tolist() == [7, 8]
    assert (question.input, question.answer) == ("abc", "x")


def test_a_plain_prompt_is_tokenised_and_not_closed(write):
    path = write({"input": "abc"})
    for closes_texts in (False, True):
        tokenizer = LetterTokenizer(closes_texts=closes_texts)
        assert load_one(path, tokenizer=tokenizer).input_token_ids.tolist() == [10, 11, 12]


def test_the_chat_template_is_used_where_there_is_one(write):
    assert load_one(write({"input": "ab"}), tokenizer=ChatTokenizer()).input_token_ids.tolist() == [
        4, 10, 11, 5,
    ]  # fmt: skip


def test_messages_go_through_the_chat_template(write):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}]
    question = load_one(write({"messages": messages}), tokenizer=ChatTokenizer())
    assert question.input_token_ids.tolist() == [4, 10, 4, 11, 12, 5]
    assert question.input == "bc"


def test_messages_without_a_chat_template_are_refused(write):
    path = write({"messages": [{"role": "user", "content": "a"}]})
    error = error_of(path, tokenizer=LetterTokenizer())
    assert "column 'messages'" in error and "chat template" in error


def test_every_column_of_the_line_is_kept_untouched(write):
    line = {"q": "ab", "nums": [1, 2], "meta": {"level": None}}
    question = load_one(
        write(line), tokenizer=LetterTokenizer(), mapping=parse_column_mapping("input=q")
    )
    assert question.columns == line and question.input == "ab" and question.answer is None


def test_a_numeric_answer_becomes_text(write):
    assert load_one(write({"input_token_ids": [1], "answer": 42})).answer == "42"


def test_empty_lines_and_a_byte_order_mark_are_skipped(write):
    path = write('\ufeff{"input_token_ids": [1]}', "", '{"input_token_ids": [2]}', "")
    assert [q.input_token_ids.tolist() for q in load_questions(path)] == [[1], [2]]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"input": ', "line 2, expected a JSON object, got '{\"input\":'"),
        ("[1, 2]", "line 2, expected a JSON object, got [1, 2]"),
        ({"input": 5}, "line 2, column 'input': expected non-empty text, got 5"),
        ({"input": "  "}, "line 2, column 'input': expected non-empty text, got '  '"),
        (
            {"question": "a"},
            "line 2, column 'input': expected non-empty text, got only columns que",
        ),
        ({"input_token_ids": []}, "line 2, column 'input_token_ids': expected a list of token ids"),
        ({"input_token_ids": "1 2"}, "line 2, column 'input_token_ids': expected a list of token"),
        (
            {"input_token_ids": [1, 2.5]},
            "column 'input_token_ids': expected whole numbers, got 2.5",
        ),
        ({"input_token_ids": [True]}, "column 'input_token_ids': expected whole numbers, got True"),
        ({"input_token_ids": [99, 100]}, "expected token ids from 0 to 99, got 100"),
        ({"input_token_ids": [-1]}, "expected token ids from 0 to 99, got -1"),
        ({"messages": ["hi"]}, "column 'messages': expected messages with a text role and content"),
        ({"input": "a", "answer": ["b"]}, "column 'answer': expected text or a number, got ['b']"),
        ({"input": "abcdef"}, "column 'input': expected a prompt of at most 5 tokens"),
    ],
)
def test_a_malformed_line_is_named_with_column_and_expectation(write, line, expected):
    path = write({"input": "abcde", "answer": "fine"}, line)
    error = error_of(path, tokenizer=LetterTokenizer(), max_tokens=5)
    assert expected in error
    assert error.startswith("data.jsonl line 2, ")


def test_the_first_errors_are_reported_together_and_then_reading_stops(write):
    lines = [{"input": number} for number in range(9)]
    error = error_of(write(*lines), tokenizer=LetterTokenizer())
    assert [f"line {number}," in error for number in range(1, 10)] == [True] * 5 + [False] * 4
    assert error.endswith("correct or remove (reading stopped at 5)")


def test_the_same_error_on_every_line_is_told_once(write):
    error = error_of(write({"q": "a"}, {"q": "b"}, {"q": "c"}), tokenizer=LetterTokenizer())
    assert "\n" not in error
    assert error.startswith("data.jsonl line 1 and 2 more like it, column 'input': expected")
    assert error.endswith("correct or remove")


def test_bytes_that_are_no_text_are_located(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"input_token_ids": [1]}\n{"input": "\xff"}\n')
    assert "line 2, expected UTF-8 text, got byte 0xff" in error_of(str(path))


def test_a_mapped_column_that_is_missing_is_named_as_the_user_names_it(write):
    path = write({"input": "a"})
    error = error_of(path, tokenizer=LetterTokenizer(), mapping={"input": "question"})
    assert "column 'question'" in error and "--column-mapping" in error and "columns input" in error


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_an_empty_file_is_refused(write, name):
    assert "at least one line" in error_of(write(name=name))


@pytest.mark.parametrize("path", ["none/data.jsonl", "./none", "/none/data", "none.parquet"])
def test_a_missing_file_is_refused_without_asking_a_hub(path):
    with pytest.raises(DataError, match="must be an existing file or folder, got '"):
        load_questions(path)


def test_a_file_of_an_unknown_kind_is_refused(write):
    assert "must end in one of .jsonl" in error_of(write("hello", name="data.docx"))


def test_json_is_read_as_an_array_or_as_lines(write):
    array = write("", '[{"input_token_ids": [1]},', '{"input_token_ids": [2]}]', name="a.json")
    lines = write({"input_token_ids": [1]}, {"input_token_ids": [2]}, name="b.json")
    for path in (array, lines):
        assert [q.input_token_ids.tolist() for q in load_questions(path)] == [[1], [2]]
    assert "data.jsonl item 1, expected a JSON object" in error_of(write("[3]", name="a.json"))


def test_what_datasets_reads_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"q": "ab", "nums": [1, 2]}, {"q": "c", "nums": [3]}])
    table.to_parquet(tmp_path / "data.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    table.to_csv(tmp_path / "folder" / "test.csv")
    for name, split in [
        ("data.parquet", "x"),
        ("saved", "x"),
        ("splits", "test"),
        ("folder", "test"),
    ]:
        questions = load_questions(
            str(tmp_path / name),
            split=split,
            mapping={"input": "q"},
            tokenizer=LetterTokenizer(),
        )
        assert [q.input_token_ids.tolist() for q in questions] == [[10, 11], [12]]
    assert questions[0].columns["q"] == "ab"
    for name in ("splits", "folder"):
        with pytest.raises(
            DataError, match=r"'validation'.*check the path, --data-config and --data-split"
        ):
            load_questions(str(tmp_path / name), split="validation")


def test_a_config_of_a_data_set_is_read_and_refused_where_there_is_none(tmp_path, write):
    pytest.importorskip("datasets")
    folder = tmp_path / "named"
    for config, word in (("main", "ab"), ("hard", "ba")):
        (folder / config).mkdir(parents=True)
        (folder / config / "train.jsonl").write_text(json.dumps({"input": word}) + "\n")
    header = "".join(
        f"- config_name: {name}\n  data_files: {name}/train.jsonl\n" for name in ("main", "hard")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{header}---\n")
    for config, ids in (("main", [10, 11]), ("hard", [11, 10])):
        (question,) = load_questions(str(folder), config=config, tokenizer=LetterTokenizer())
        assert question.input_token_ids.tolist() == ids
    with pytest.raises(DataError, match="check the path, --data-config and --data-split"):
        load_questions(str(folder), tokenizer=LetterTokenizer())
    with pytest.raises(DataError, match="--data-config main must go with a data set"):
        load_questions(write({"input": "a"}), config="main", tokenizer=LetterTokenizer())


def test_pairs_are_tokenised_and_closed_by_the_end_token(write):
    path = write({"question": "ab", "completion": "c"})
    (pair,) = load_pairs(
        path, tokenizer=LetterTokenizer(closes_texts=True), mapping={"input": "question"}
    )
    assert pair.prompt_token_ids.tolist() == [10, 11]
    assert pair.completion_token_ids.tolist() == [12, 2]


def test_pairs_of_token_ids_are_taken_as_they_are(write):
    (pair,) = load_pairs(write({"input_token_ids": [1, 2], "completion_token_ids": [3]}))
    assert (pair.prompt_token_ids.tolist(), pair.completion_token_ids.tolist()) == ([1, 2], [3])


@pytest.mark.parametrize(
    ("line", "ids"),
    [
        ({"text": "abc", "url": "u"}, [10, 11, 12, 2]),
        ({"completion": "abc", "note": None}, [10, 11, 12, 2]),
        ({"completion_token_ids": [4, 5, 6]}, [4, 5, 6]),
        ({"text": "ab", "input": "c", "completion": "a"}, [12, 10, 2]),
    ],
)
def test_a_line_without_a_prompt_is_trained_after_its_first_token(write, line, ids):
    (pair,) = load_pairs(write(line), tokenizer=LetterTokenizer())
    assert pair.prompt_token_ids.tolist() == ids[:1]
    assert pair.completion_token_ids.tolist() == ids[1:]


def test_a_tokenizer_s_start_token_is_the_context_of_a_whole_text(write):
    class StartingTokenizer(LetterTokenizer):
        def __call__(self, text, **options):
            return {"input_ids": [1, *super().__call__(text, **options)["input_ids"]]}

    (pair,) = load_pairs(write({"text": "ab"}), tokenizer=StartingTokenizer(closes_texts=True))
    assert pair.prompt_token_ids.tolist() == [1]
    assert pair.completion_token_ids.tolist() == [10, 11, 2]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            {"prompt": "a", "completion": "b"},
            "column 'input': expected .* only columns prompt, com",
        ),
        ({"prompt": "a", "text": "b", "completion": "c"}, "column 'input'"),
        ({"text": " "}, "column 'text': expected non-empty text"),
        ({"completion_token_ids": [3]}, "expected at least two tokens"),
        ({"text": "abcdef"}, "column 'text': expected a pair of at most 5 tokens"),
        ({"input": "a"}, "column 'completion': expected non-empty text"),
        ({"input": "ab", "completion": "cde"}, "expected a pair of at most 5 tokens"),
    ],
)
def test_a_malformed_pair_is_named(write, line, expected):
    with pytest.raises(DataError, match=expected):
        load_pairs(write(line), tokenizer=LetterTokenizer(), max_tokens=5)


def test_a_tokenizer_without_an_end_token_cannot_close_completions(write):
    tokenizer = LetterTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(DataError, match="end token"):
        load_pairs(write({"input": "a", "completion": "b"}), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("question=input", "got 'question=input': ours are input, messages"),
        ("input", "our=yours pairs, got 'input'"),
        ("input=", "our=yours pairs"),
        ("input=a,input=b", "got 'input=b': ours are input, .*, each at most once"),
    ],
)
def test_an_unusable_column_mapping_is_refused(text, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_column_mapping(text)


def load_given(path, **options):
    return list(load(GivenTable, "given", path, **options))


def test_a_given_pair_has_its_tokens_its_texts_and_every_column(write):
    line = {"input": "ab", "completion": "c", "dataset_type": "sums", "answer": [1]}
    (pair,) = load_given(write(line))
    assert pair.question.input_token_ids.tolist() == [10, 11]
    assert pair.completion_token_ids.tolist() == [12, 2]
    assert (pair.question.input, pair.completion) == ("ab", "c")
    assert pair.question.columns == line and pair.question.answer is None
    assert pair.num_tokens == 4


def test_a_given_pair_of_token_ids_is_decoded_for_people(write):
    (pair,) = load_given(write({"input_token_ids": [10], "completion_token_ids": [11, 12]}))
    assert (pair.question.input, pair.completion) == ("a", "bc")


@pytest.mark.parametrize(
    "answer", [{"completion": "bc"}, {"completion_token_ids": [11, 12, 2]}], ids=["text", "ids"]
)
def test_a_question_has_its_reference_answer_where_it_is_asked_for(answer, write):
    path = write({"input": "a", "answer": "7"} | answer)
    (plain,) = load(QuestionTable, "question", path)
    assert plain.reference_token_ids is None and not plain.reference
    (question,) = load(QuestionTable, "question", path, longest_pair=4)
    assert question.reference_token_ids.tolist() == [11, 12, 2]
    assert question.reference == "bc"  # without its end, as graders read outputs
    assert (question.input, question.answer, question.columns["answer"]) == ("a", "7", "7")
    with pytest.raises(DataError, match="expected a pair of at most 3 tokens"):
        load(QuestionTable, "question", path, longest_pair=3)


def test_of_the_first_lines_alone_none_that_is_malformed_is_passed_over(write):
    path = write({"input": "a"}, {"input": None}, {"input": "b"}, {"no": 1})
    reader = LineReader(tokenizer=LetterTokenizer(), vocab_size=100, max_tokens=9)
    source = DataSource(path)
    assert len(list(load_records(source, reader.question, limit=1))) == 1
    with pytest.raises(DataError, match=r"line 2, column 'input': [^$]*correct or remove$"):
        list(load_records(source, reader.question, limit=2))


def test_with_reference_answers_every_line_must_have_one(write):
    path = write({"input": "a", "completion": "b"}, {"input": "a", "completion": None})
    with pytest.raises(DataError, match="line 2, column 'completion': expected non-empty text"):
        load(QuestionTable, "question", path, longest_pair=9)


def test_a_given_pair_that_is_too_long_is_refused_with_its_line(write):
    path = write({"input": "a", "completion": "b"}, {"input": "abc", "completion": "de"})
    with pytest.raises(DataError, match=r"line 2, .*expected a pair of at most 5 tokens .*got 6"):
        load_given(path, max_tokens=5)


def test_what_stands_in_a_csv_file_is_text(write):
    path = write("input,answer,level", "ab,007,1", 'c,,"x\ny,z"', "d,NaN,1.50", name="data.csv")
    questions = load_questions(path)
    assert [question.answer for question in questions] == ["007", "", "NaN"]
    assert [question.columns["level"] for question in questions] == ["1", "x\ny,z", "1.50"]


def test_a_folder_of_csv_files_is_text_too(write, tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "folder").mkdir()
    write("input,answer", "ab,007", "c,", "d,10", name="folder/train.csv")
    answers = [question.answer for question in load_questions(str(tmp_path / "folder"))]
    assert answers == ["007", "", "10"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["input,answer", "a,b", "c, d,e"], "data.csv line 3 must hold one value for each.*quotes"),
        (["input,answer", '"a\nb",c', "d"], "data.csv line 4 must hold one value for each"),
        (["input,input", "a,b"], "name each column once"),
        (["input,answer", 'a,"b'], "must be CSV in UTF-8"),
    ],
)
def test_a_broken_csv_line_is_named(write, lines, expected):
    with pytest.raises(DataError, match=expected):
        load_questions(write(*lines, name="data.csv"))


def test_columns_are_converted_where_the_user_says_so(write):
    path = write("input,x,y,z,s", "ab,007,1.50,True,7", name="data.csv")
    types = {"x": "int", "y": "float", "z": "bool", "s": "str"}
    (question,) = load_questions(path, types=types)
    assert question.columns == {"input": "ab", "x": 7, "y": 1.5, "z": True, "s": "7"}
    path = write({"input": "ab", "x": "5", "y": None}, {"input": "ab", "x": 5, "y": 1})
    questions = load_questions(path, types={"x": "int", "y": "str"})
    assert [question.columns["x"] for question in questions] == [5, 5]
    assert [question.columns["y"] for question in questions] == [None, "1"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [("int", "1.5"), ("int", ""), ("float", "nan"), ("float", "1e999"), ("bool", "1")],
)
def test_a_value_that_does_not_convert_is_refused_with_its_line(write, kind, value):
    path = write("input,x", "a,1.0", f"b,{value}", name="data.csv")
    with pytest.raises(DataError, match=f"csv line .*, column 'x': expected {kind}.*'{value}'"):
        load_questions(path, types={"x": kind})
    with pytest.raises(DataError, match="column 'level': expected what columns level=int names"):
        load_questions(path, types={"level": "int"})


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_json_has_not_is_refused_with_its_line(write, constant):
    lines = '{"input": "a"}', f'{{"input": "b", "answer": {constant}}}'
    expected = f"expected JSON, .* got {constant}"
    with pytest.raises(DataError, match=f"data.jsonl line 2, {expected}"):
        load_questions(write(*lines))
    with pytest.raises(DataError, match=f"data.json item 2, {expected}"):
        load_questions(write(f"[{lines[0]},", f"{lines[1]}]", name="data.json"))


def test_an_answer_that_is_no_number_is_refused(write):
    with pytest.raises(DataError, match="line 1, column 'answer': expected text or a number"):
        load_questions(write('{"input": "a", "answer": 1e999}'))


CHAT = [{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}]


def test_messages_are_the_prompt_and_input_the_question_of_rewards(write):
    path = write({"input": "cc", "messages": CHAT})
    for mapping in ({}, {"input": "input", "messages": "messages"}):
        question = load_one(path, tokenizer=ChatTokenizer(), mapping=mapping)
        assert question.input_token_ids.tolist() == [4, 10, 4, 11, 12, 5]
        assert question.input == "cc"


def test_a_mapped_input_is_the_prompt_and_loses_no_system_turn(write):
    answered = [CHAT[1], {"role": "assistant", "content": "d"}]
    mapping, tokenizer = {"input": "q"}, ChatTokenizer()
    path = write({"q": "cc", "messages": answered})
    question = load_one(path, tokenizer=tokenizer, mapping=mapping)
    assert question.input_token_ids.tolist() == [4, 12, 12, 5]
    error = error_of(write({"q": "cc", "messages": CHAT}), tokenizer=tokenizer, mapping=mapping)
    assert "column 'messages': expected to be mapped too (messages=messages)" in error
    error = error_of(write({"input": "cc", "messages": answered}), tokenizer=tokenizer)
    assert "column 'messages': expected a conversation that ends before the answer" in error
