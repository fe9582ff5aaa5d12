"""What roles hold together: sums, monotony, and refusals that name what would help."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.runs import asked, with_train

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.bill import GIB
from async_grpo.planning import bills
from async_grpo.planning.asked import PUBLISHED, Split
from async_grpo.planning.bills import bills_of, check_fits, fewest_ranks, rank_bill_of
from async_grpo.util.errors import ConfigError
from async_grpo.weight_sync import buckets, gather

MODELS = st.sampled_from(sorted(PUBLISHED))


@settings(max_examples=30, deadline=None)
@given(MODELS, st.integers(1, 64), st.integers(1, 64), st.sampled_from(["", "64"]))
def test_a_bill_is_the_sum_of_its_lines_and_each_line_has_a_formula(model, ranks, engines, devices):
    for role in bills_of(asked(model, devices=devices, kl=0.1), Split(engines, ranks, (1,))):
        here = [line for line in role.bill.lines if not line.on_host]
        assert role.bill.total == sum(line.num_bytes for line in here)
        assert (
            role.bill.on_host == sum(line.num_bytes for line in role.bill.lines) - role.bill.total
        )
        assert all(line.formula and line.num_bytes >= 0 for line in role.bill.lines)
        assert role.bill.on_host == 0 or devices


@settings(max_examples=30, deadline=None)
@given(MODELS, st.integers(1, 32), st.integers(2, 32))
def test_more_ranks_never_hold_more_each_and_more_tokens_never_less(model, ranks, thousands):
    run = asked(model, activation_checkpointing="on", max_tokens_per_gpu=1024 * thousands)
    assert rank_bill_of(run, 2 * ranks).total <= rank_bill_of(run, ranks).total
    more = with_train(run, max_tokens_per_gpu=2048 * thousands)
    assert rank_bill_of(more, ranks).total >= rank_bill_of(run, ranks).total


@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen2.5-32b", "llama-3.1-70b"])
def test_the_fewest_ranks_fit_and_one_fewer_does_not(model):
    run = asked(model, max_tokens_per_gpu=8192)
    ranks, room = fewest_ranks(run), run.fleet.kind.memory_bytes
    assert rank_bill_of(run, ranks).total <= room
    assert ranks == 1 or rank_bill_of(run, ranks - 1).total > room


def test_roles_are_those_of_the_run():
    teacher = WorkerConfig(mode="teacher", name="sums", model_path="m", max_model_len=4096)
    roles = [role.role for role in bills_of(asked(kl=0.1, workers=[teacher]), Split(2, 4, (1, 1)))]
    assert roles == [
        "trainer rank", "generation worker", "reference worker", "teacher:sums worker",
        "controller", "verifier pool", "Ray and a dispatcher", "object store of a machine",
    ]  # fmt: skip


def refusal(run):
    with pytest.raises(ConfigError) as caught:
        check_fits(run)
    return str(caught.value)


def test_too_many_tokens_are_refused_with_what_would_fit():
    run = asked(devices="4", max_tokens_per_gpu=1 << 20, activation_checkpointing="on")
    said = refusal(run)
    lower = int(said.partition("--max-tokens-per-gpu to ")[2].partition(",")[0])
    assert said.startswith("--max-tokens-per-gpu 1048576 does not fit on 2 ranks: a rank needs")
    assert "GiB too much" in said
    fitting = with_train(run, max_tokens_per_gpu=lower)
    assert rank_bill_of(fitting, 2).total <= run.fleet.kind.memory_bytes
    check_fits(fitting)
    over = rank_bill_of(run, 2).total - run.fleet.kind.memory_bytes
    assert f"{over / GIB:.1f} GiB too much" in said


def test_a_model_that_only_more_ranks_hold_names_them():
    run = asked("qwen2.5-72b", devices="8", tensor_parallel=4, max_tokens_per_gpu=2048)
    assert f"train on {fewest_ranks(run)} ranks or more (--nproc-per-node)" in refusal(run)


def test_an_engine_that_is_too_large_for_a_device_names_the_tensor_parallel_size():
    said = refusal(asked("qwen2.5-72b", devices="64", tensor_parallel=1))
    assert said.startswith("--tensor-parallel-size 1 of the generation worker is too few: each")
    assert "raise it to 4" in said
    check_fits(asked("qwen2.5-72b", devices="64", tensor_parallel=4))


def test_a_scoring_worker_that_is_too_large_names_its_tokens():
    run = asked(kl=0.1)
    large = replace(run.workers[1], max_tokens_per_gpu=1 << 20)
    said = refusal(replace(run, workers=(run.workers[0], large)))
    assert said.startswith("--max-tokens-per-gpu 1048576 of the reference worker does not fit")
    assert "lower it to 262144" in said


def test_a_reference_larger_than_a_device_is_sharded():
    run = asked("qwen2.5-72b", devices="64", tensor_parallel=4, kl=0.1)
    assert refusal(run).endswith("GiB too much: shard it over --scorer-ranks 4")
    sharded = run.with_worker(1, scorer_ranks=4)
    check_fits(sharded)
    split = Split(4, 16, (2,))
    assert sharded.devices_of(split) - run.devices_of(split) == 2 * 3
    [bill] = [each for each in bills_of(sharded, split) if "reference" in each.role]
    assert (bill.role, bill.count) == ("rank of a reference worker", 8)
    assert bill.bill.total <= bill.room


def test_a_machine_without_the_memory_is_refused():
    run = replace(asked("smollm2-135m", devices=""), host_bytes=GIB)
    assert refusal(run).startswith("this machine has 1.0 GiB and the run needs about ")
    check_fits(replace(run, host_bytes=64 * GIB))


def test_a_batch_of_several_passes_is_billed_in_the_host_with_what_teachers_sent():
    """64 questions x 8 samples of 1,024 tokens on 2 ranks; 13 bytes a token, 4 a log-probability,
    and of each teacher's hidden state 2 a number."""

    def held(run):
        lines = rank_bill_of(run, 2).lines
        return [line for line in lines if line.name == "a batch for its later passes"]

    assert held(asked(kl=0.1)) == []
    teacher = WorkerConfig(mode="teacher", name="sums", model_path="m", max_model_len=4096)
    taught = {"teacher_for": "sums", "gkd_coefficient": 1.0, "teacher_payload": "hidden"}
    tokens = 64 * 8 // 2 * 1024
    for more, token in (({}, 13 + 4), ({"workers": [teacher], **taught}, 13 + 4 + 4 + 2 * 3584)):
        (line,) = held(asked(kl=0.1, num_passes=2, **more))
        assert (line.num_bytes, line.on_host) == (tokens * token, True)
        assert line.formula == f"{token} a token of B n / ranks longest outputs"


def test_buckets_are_those_of_the_weights():
    assert bills.BUCKET_BYTES == buckets.BUCKET_BYTES
    assert bills.BUCKETS == gather.NUM_HOST_BUFFERS


def test_a_model_that_each_rank_would_hold_is_refused_with_the_strategy_that_shares_it():
    run = asked("qwen2.5-7b", devices="16", fsdp_sharding_strategy="NO_SHARD")
    with pytest.raises(ConfigError, match=r"give --fsdp-sharding-strategy FULL_SHARD, or train an"):
        check_fits(run)
    divided = asked("qwen2.5-7b", devices="16", fsdp_sharding_strategy="ZERO1")
    bills = [rank_bill_of(divided, ranks).total for ranks in (1, 8)]
    assert bills[0] - bills[1] == pytest.approx(7 * divided.model.num_parameters, abs=64)


def test_a_reward_model_has_its_devices_and_its_bill():
    reward = WorkerConfig(mode="reward", model_path="r", tensor_parallel_size=2, num_workers=3)
    run = asked("qwen2.5-7b", workers=[reward])
    assert run.other_devices == 6
    split = run.own_split
    assert run.devices_of(split) == asked("qwen2.5-7b").devices_of(split) + 6
    (bill,) = [each for each in bills_of(run, split) if each.role == "service:reward worker"]
    assert bill.count == 3 and bill.bill.total > 2 * run.model.num_parameters / 2
    large = asked("qwen2.5-72b", devices="64", workers=[replace(reward, tensor_parallel_size=1)])
    assert "of the service:reward worker is too few" in refusal(with_engines(large, 8))


def with_engines(run, parts):
    """The run with engines of so many devices."""
    first, *others = run.workers
    return replace(run, workers=(replace(first, tensor_parallel_size=parts), *others))


def test_an_adapter_that_fits_is_offered_and_said():
    run = asked("qwen2.5-7b", devices="2", max_tokens_per_gpu=2048)
    with pytest.raises(ConfigError, match=r"or train an adapter \(--lora-rank 16\)"):
        check_fits(replace(run, num_ranks=1, fleet=replace(run.fleet, nodes=(1,))))
    adapter = run.with_train(lora_rank=16)
    assert rank_bill_of(adapter, 1).total < run.fleet.kind.memory_bytes
    assert rank_bill_of(adapter.without_adapter(), 1) == rank_bill_of(run, 1)
    assert adapter.published == adapter.model.trained.touched_parameters < run.published


def test_devices_in_turns_hold_the_larger_of_engine_and_rank_and_hosts_hold_both():
    apart = asked("qwen2.5-7b", devices="8", max_tokens_per_gpu=8192)
    turns = with_train(apart, colocated=True, max_staleness=0)
    split = Split(8, 8)
    (rank, engine), (rank_too, engine_too) = (bills_of(each, split)[:2] for each in (apart, turns))
    graphs = bills.memory.GRAPHS_BYTES
    assert rank_too.bill.total == rank.bill.total + graphs
    assert engine_too.bill.total == engine.bill.total
    room = apart.fleet.kind.memory_bytes
    assert max(rank_too.bill.total, engine_too.bill.total) <= room
    assert rank.bill.total + engine.bill.total > room
    parameters = apart.model.num_parameters
    assert rank_too.bill.on_host - rank.bill.on_host == pytest.approx(12 * parameters / 8, rel=1e-3)
    assert engine_too.bill.on_host - engine.bill.on_host == 2 * parameters
    check_fits(turns)
