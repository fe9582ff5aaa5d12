"""What a device does not decide of the GPU benchmark: arithmetic, isolation, the sheet."""

import json
import os
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from async_grpo.model.collate import collate
from benchmarks import procfs
from benchmarks.gpu import isolation, rows, sheet, summary
from benchmarks.gpu.isolation import NotHereError, Problem, Trial
from benchmarks.gpu.plan import GOAL_VARIANTS, OTHER_VARIANTS, trials
from benchmarks.gpu.shapes import (
    QWEN_05B,
    QWEN_7B,
    QWEN_15B,
    TOY,
    attention_flops,
    random_policy,
    step_flops,
)
from benchmarks.results import Figure

HOST = torch.device("cpu")


def counted_products(segments):
    """FLOPs of matrix products that torch counts in a plain step, and the scored tokens."""
    policy = random_policy(TOY, device=HOST, dtype=torch.float32, attention="packed")
    minibatch = rows.minibatch(segments, vocabulary=TOY.vocabulary, seed=0)
    packed = collate(minibatch.samples, aggregation="sample-mean")
    with FlopCounterMode(display=False) as counter:
        hidden = policy.model.base_model(
            input_ids=packed.input_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            cu_seq_lens_q=packed.cu_seqlens,
            max_length_q=packed.max_seqlen,
        ).last_hidden_state[0]
        policy.model.lm_head(hidden[packed.logit_positions]).sum().backward()
    products = {
        operation: flops
        for operation, flops in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(operation)
    }
    return sum(products.values()), len(packed.target_ids)


def test_the_arithmetic_is_what_torch_counts():
    segments = [30, 9, 25]
    counted, num_scored = counted_products(segments)
    attention = 3 * TOY.num_layers * attention_flops(TOY, segments)
    assert num_scored < sum(segments)
    assert counted == step_flops(TOY, segments, num_scored=num_scored) - attention


def test_attention_counts_the_pairs_that_causality_leaves():
    longer = step_flops(TOY, [7], num_scored=0) - step_flops(TOY, [6, 1], num_scored=0)
    assert longer == 3 * TOY.num_layers * 4 * TOY.hidden * 6  # the last token sees six others


@pytest.mark.parametrize(
    ("shape", "billions"), [(QWEN_05B, 0.494), (QWEN_15B, 1.544), (QWEN_7B, 7.616)]
)
def test_the_shapes_are_qwen_s(shape, billions):
    policy = random_policy(
        shape, device=torch.device("meta"), dtype=torch.bfloat16, attention="packed"
    )
    sizes = {name: value.numel() for name, value in policy.model.named_parameters()}
    assert sum(sizes.values()) == pytest.approx(billions * 1e9, rel=1e-3)
    in_layers = [n for name, n in sizes.items() if "layers" in name and "proj.weight" in name]
    assert sum(in_layers) == shape.layer_weights


@pytest.mark.parametrize("total", [64, 512, 16_384])
def test_rows_fill_their_budget_exactly(total):
    for cut, segments in rows.mixtures(total).items():
        assert sum(segments) == total and min(segments) >= 2, cut
        minibatch = rows.minibatch(segments, vocabulary=100, seed=1)
        packed = collate(minibatch.samples, aggregation="sample-mean")
        assert packed.cu_seqlens.diff().tolist() == segments


def said(work, *, limit_s=60.0):
    return list(isolation.run(Trial("variant", work), limit_s=limit_s))


FIRST = Figure("first", 1.0, "s")


def out_of_memory():
    yield FIRST
    raise torch.OutOfMemoryError("CUDA has no 9 GiB\nand what there is")


def missing():
    raise NotHereError("no such kernel")
    yield FIRST


def broken():
    yield FIRST
    raise ValueError("a shape is wrong")


def crashing():
    yield FIRST
    os._exit(7)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (out_of_memory, [FIRST, Problem("out of memory: CUDA has no 9 GiB")]),
        (missing, [Problem("left out, no such kernel")]),
        (broken, [FIRST, Problem("ValueError: a shape is wrong", is_failure=True)]),
        (crashing, [FIRST, Problem("its process ended, exit code 7", is_failure=True)]),
    ],
)  # fmt: skip
def test_a_variant_that_fails_says_why_after_what_it_had(work, expected):
    assert said(work) == expected
    assert said(lambda: [FIRST]) == [FIRST]  # the next one is not harmed


def test_a_variant_that_hangs_ends_with_what_it_started(tmp_path):
    file = tmp_path / "pids"

    def hanging():
        yield FIRST
        file.write_text(f"{os.fork() or time.sleep(600)}")
        time.sleep(600)

    begin = time.monotonic()
    assert said(hanging, limit_s=1.0) == [FIRST, Problem("not done within 1 s")]
    assert time.monotonic() - begin < 60
    deadline = time.monotonic() + 10  # killed, it may take a moment to go
    while procfs.is_running(int(file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not procfs.is_running(int(file.read_text()))


def test_figures_are_on_file_before_the_next_variant_starts(tmp_path):
    page = sheet.Sheet(tmp_path, device="some GPU", toy=False)
    page.fill("one", [FIRST, Problem("out of memory: 9 GiB")])
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert [figure["name"] for figure in content["figures"]] == ["first"]
    assert content["machine"].startswith("some GPU, torch ")


def test_an_error_of_ours_fails_the_command_and_a_full_device_does_not(tmp_path):
    page = sheet.Sheet(tmp_path, device="some GPU", toy=False)
    page.fill("one", [Problem("out of memory: 9 GiB")])
    page.close()
    page.fill("two", [Problem("ValueError: x", is_failure=True)])
    with pytest.raises(Exception, match="two: ValueError: x"):
        page.close()


def test_toy_figures_cannot_be_taken_for_a_gpu_s(tmp_path):
    page = sheet.Sheet(tmp_path, device="", toy=True)
    page.fill("limits", [Figure("matmul bf16 256", 0.1, "TFLOP/s", "higher", goal=1.0)])
    assert not (tmp_path / "gpu.json").exists()
    content = json.loads((tmp_path / "gpu_toy.json").read_text())
    assert content["machine"].startswith("no NVIDIA device")
    (figure,) = content["figures"]
    assert figure["name"] == "TOY SIZE, matmul bf16 256" and figure["goal"] is None


def test_utilisation_is_a_share_of_the_fastest_product_and_the_best_variant_meets_the_goal():
    slow, fast = (variant.name for variant in GOAL_VARIANTS[:2])
    other = OTHER_VARIANTS[0].name
    figures = summary.derived(
        [
            Figure("matmul bf16 8192", 700.0, "TFLOP/s", "higher"),
            Figure("matmul bf16 16384", 800.0, "TFLOP/s", "higher"),
            Figure(f"{slow}, model arithmetic", 200.0, "TFLOP/s", "higher"),
            Figure(f"{fast}, model arithmetic", 440.0, "TFLOP/s", "higher"),
            Figure(f"{other}, model arithmetic", 600.0, "TFLOP/s", "higher"),
        ]
    )
    shares = {figure.name: figure.value for figure in figures}
    assert shares[f"{slow}, MFU"] == 0.25 and shares[f"{other}, MFU"] == 0.75
    (goal,) = [figure for figure in figures if figure.goal]
    assert (goal.value, goal.goal) == (440 / 800, 0.5)


def test_ratios_are_of_the_same_cut_and_quantity():
    figures = summary.derived(
        [
            Figure("head, full logits, time", 2.0, "s"),
            Figure("head, chunks of 1024, time", 2.4, "s"),
            Figure("attention, packed, one, time", 2.0, "s"),
            Figure("attention, dense mask, one, time", 5.0, "s"),
            Figure("attention, dense mask, 8 equal, time", 7.0, "s"),
        ]
    )
    assert {figure.name: (figure.value, figure.goal) for figure in figures} == {
        "head, chunks of 1024 / full logits, time": (1.2, 1.4),
        "attention, dense mask / packed, one, time": (2.5, None),
    }


def test_every_variant_has_its_own_name_and_the_goal_comes_before_the_rest():
    parts = ("numerics", "trainer", "heads", "attention")
    names = [trial.name for trial in trials(parts, toy=False, compiles=True)]
    assert len(set(names)) == len(names)
    last_goal = max(names.index(variant.name) for variant in GOAL_VARIANTS)
    assert last_goal < min(names.index(variant.name) for variant in OTHER_VARIANTS)
    assert names[0] == "limits of the device"
