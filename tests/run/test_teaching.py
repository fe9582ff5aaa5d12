"""What a trainer looks at before it learns from teachers: types, their models, their heads."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cluster import client_of, controller_client
from scripted_run import make_config

from async_grpo.algorithms.base import Algorithm, ScoreNeed
from async_grpo.checkpoint.resume import Start
from async_grpo.model.lm_head import UNCHANGED, Rescaling
from async_grpo.run.data import check_types
from async_grpo.run.preparation import with_workers
from async_grpo.run.recruitment import teachers_of
from async_grpo.run.sampled_data import meet_teachers
from async_grpo.types import Payload, Question, WorkerInfo
from async_grpo.util.errors import CheckpointError, ConfigError, DataError

LEARNS = {"gkd_coefficient": 1.0}


def lines(*kinds):
    ids = np.arange(2, dtype=np.int32)
    return [Question(ids, "", "", {}, kind or "") for kind in kinds]


def pairs(*kinds):
    return [SimpleNamespace(question=question) for question in lines(*kinds)]


def config_of(*routes, **options):
    return make_config(teacher_for=",".join(routes), pairs_path="pairs.jsonl", **LEARNS | options)


@pytest.mark.parametrize(
    ("routes", "kinds", "of_pairs"),
    [
        (("a",), ("anything", None), ()),
        (("sums=a", "b"), ("sums", "poems", None), ("songs",)),
        (("sums=a", "poems=b"), ("sums",), ("poems",)),
        (("sums=a", "poems=a"), ("sums", "poems"), ()),
    ],
)
def test_every_line_has_a_teacher_and_every_teacher_a_line(routes, kinds, of_pairs):
    check_types(config_of(*routes), lines(*kinds), pairs(*of_pairs))


@pytest.mark.parametrize(
    ("kinds", "of_pairs", "said"),
    [
        (("sums", "poems"), (), "every dataset_type of d must have a teacher, 'poems' has none: "),
        (("sums", None), (), "every dataset_type of d must have a teacher, '' has none: add"),
        (("sums",), ("odes", "poems"), "of pairs.jsonl must have a teacher, 'odes', 'poems' has"),
        (("sums", *"abcdefg"), (), "'a', 'b', 'c', 'd', 'e', ... has none"),
    ],
)
def test_lines_that_no_teacher_teaches_are_refused(kinds, of_pairs, said):
    with pytest.raises(DataError) as caught:
        check_types(config_of("sums=a"), lines(*kinds), pairs(*of_pairs))
    assert said in str(caught.value)
    assert "add --teacher-for TYPE=NAME for it, or NAME for all others" in str(caught.value)


def test_a_teacher_without_a_line_is_refused():
    said = (
        "--teacher-for poems=b names a teacher that nobody uses: no line of d has the "
        "dataset_type 'poems', but '', 'sums'"
    )
    with pytest.raises(DataError) as caught:
        check_types(config_of("sums=a", "poems=b", "c"), lines("sums", None), ())
    assert str(caught.value) == said


def test_a_line_without_a_type_is_told_of_by_the_column_s_name_of_the_user_s():
    config = config_of("sums=a", column_mapping="dataset_type=kind")
    check_types(config, lines("sums"), ())
    with pytest.raises(DataError, match="every kind of d must have a teacher, '' has none"):
        check_types(config, lines(None), ())


def info(name, model_hash):
    return WorkerInfo(name, "teacher:a", "node", 1, f"/models/{name}", 64, 1.0, 0.0, 512,
                      model_hash=model_hash)  # fmt: skip


def test_the_teachers_and_services_of_a_run_are_part_of_its_checkpoints():
    hashes = Future()
    hashes.set_result({"model": "m"})
    teachers = {"a": info("w0", "one"), "b": info("w1", "two")}
    served, other = info("w2", "three"), info("w3", "")
    served = replace(served, role="service:index", code={"service index": "three"})
    saved = with_workers(hashes, teachers, [served], start=Start()).result(timeout=10)
    assert saved == {"model": "m", "teacher a": "one", "teacher b": "two", "service index": "three"}
    start = Start("checkpoint", SimpleNamespace(hashes=saved))
    assert with_workers(hashes, teachers, [served], start=start).result(timeout=10) == saved
    with pytest.raises(CheckpointError) as caught:
        with_workers(hashes, teachers | {"b": info("w1", "other")}, [served], start=start)
    assert "the teacher b of /models/w1 must be what checkpoint was trained with" in str(
        caught.value
    )
    assert with_workers(hashes, {}, [other], start=start) is hashes


def members(*found):
    return controller_client(members=lambda role: [m for m in found if m.role == role])


def test_the_teachers_of_a_run_are_those_of_its_names():
    found = teachers_of(members(info("w0", "one")), config_of("a"))
    assert found == {"a": info("w0", "one")}


def test_more_tokens_than_a_teacher_has_are_refused_before_the_run_begins():
    own = info("w0", "one")
    with pytest.raises(ConfigError, match=f"--gkd-top-k must not exceed the {own.vocab_size} tok"):
        teachers_of(members(own), config_of("a", gkd_top_k=own.vocab_size + 1))


class Meets(Algorithm):
    """An algorithm of a user's that asks teachers, and keeps those that it has met."""

    needs = (ScoreNeed("teacher", payload=Payload("logits", 0, 1.0)),)

    def teacher_terms(self, teachers):
        self.met = teachers
        return ("a term",)


class NeedsHeads(Meets):
    needs = (ScoreNeed("teacher", payload=Payload("hidden", 0, 1.0), fetches_heads=True),)


class Controller:
    def __init__(self, heads):
        self.heads = heads  # {role: its arrays}

    def teacher_head(self, run, role):
        return [self.heads.get(role)]


def met(kind, widths, heads=None):
    algorithm = kind(config_of("x=a", "b"))
    step = SimpleNamespace(head_terms=("its own",))
    learner = SimpleNamespace(
        config=algorithm.config, algorithm=algorithm, step=step, device=torch.device("cpu")
    )
    meet_teachers(learner, client_of(Controller(heads or {})), lambda: widths)
    assert step.head_terms == ("its own", "a term")
    return algorithm.met


def test_ranks_get_the_heads_of_teachers_that_send_hidden_states():
    bits = np.array([[0x3F80, 0xC000]], np.uint16)  # 1 and -2 in bfloat16
    of_a = {"weight": bits, "rescaling": np.array([0.5, 30.0])}
    of_b = {
        "weight": np.ones((2, 3), np.float32),
        "bias": np.zeros(2, np.float32),
        "rescaling": np.array([1.0, 0.0]),
    }
    first, second = met(NeedsHeads, {"a": 1, "b": 2}, {"teacher:a": of_a, "teacher:b": of_b})
    assert (first.width, first.head.bias) == (1, None)
    assert first.head.weight.dtype == torch.bfloat16
    assert first.head.weight.tolist() == [[1.0, -2.0]]
    assert first.head.rescaling == Rescaling(factor=0.5, softcap=30.0)
    assert (second.width, second.head.weight.shape) == (2, (2, 3))
    assert second.head.bias.tolist() == [0.0, 0.0]
    assert second.head.rescaling == UNCHANGED
    with pytest.raises(DataError, match="the head of teacher b did not come"):
        met(NeedsHeads, {"a": 1, "b": 2}, {"teacher:a": of_a})


def test_no_head_is_fetched_that_no_need_names():
    teachers = met(Meets, {"a": 1, "b": 2})
    assert [(each.width, each.head) for each in teachers] == [(1, None), (2, None)]


def test_an_algorithm_without_teachers_meets_none():
    learner = SimpleNamespace(algorithm=Algorithm(config_of("a")), config=None)
    meet_teachers(learner, client_of(None), lambda: pytest.fail("nobody is asked"))
