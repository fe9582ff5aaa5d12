"""Splits and staleness: what is found is legal, and more devices are no slower."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from effort import histories
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning.runs import asked, with_train, work

from async_grpo.devices.bill import cached_tokens
from async_grpo.planning import prediction
from async_grpo.planning.asked import H100, KINDS, PUBLISHED, Fleet, Split, fleet_of
from async_grpo.planning.bills import bills_of, check_fits, engine_of, fewest_ranks
from async_grpo.planning.prediction import (
    WARM_UP,
    Prediction,
    even_flow,
    part_of,
    predict,
    scenario_of,
    slowed,
    thinned,
)
from async_grpo.planning.rates import PACK_BYTES_PER_S, slower
from async_grpo.planning.search import most_engines, search
from async_grpo.planning.service import mean, simulate
from async_grpo.util.errors import ConfigError
from async_grpo.weight_sync.buckets import BUCKET_BYTES
from async_grpo.weight_sync.gather import NUM_HOST_BUFFERS

NOISE = 0.1  # of batches of 128 samples, and of splits that are not tried


@pytest.fixture(scope="module", autouse=True)
def few_batches():
    """In each simulation, which measures up to twelve."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "MEASURED", (2, 4))
        yield


def at_once(given, split, *, max_staleness):
    """A prediction without a simulation: that of an even flow."""
    step_s = max(even_flow(given, split))
    numbers = {each.name: 0.0 for each in fields(Prediction) if each.name.endswith("_s")}
    numbers |= {"step_s": step_s, "samples_per_s": 1 / step_s, "places": 0.5, "rounds": 1.0}
    return Prediction(split=split, max_staleness=max_staleness, **numbers)


def fastest(run, **options):
    return search(work(run), run, bounds=(1,), **options).best


@settings(max_examples=histories(2, full=50), deadline=None)
@given(st.integers(3, 24), st.integers(1, 8))
def test_more_devices_are_never_slower(devices, more):
    """Unless weights must now travel between machines."""
    assume((devices > 8) == (devices + more > 8))
    run = asked("qwen2.5-1.5b", devices=str(devices), batch_size=16)
    larger = replace(run, fleet=fleet_of(str(devices + more)))
    assert fastest(larger).samples_per_s >= (1 - NOISE) * fastest(run).samples_per_s


@pytest.mark.parametrize("devices", ["3", "7", "8,8", "24"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_split_takes_no_more_than_there_is(devices, kl):
    run = asked("qwen2.5-1.5b", devices=devices, kl=kl, batch_size=16)
    split = fastest(run, predict=at_once).split
    assert run.devices_of(split) <= run.fleet.num_devices
    assert min(split.engines, split.ranks, *split.scorers, 1) == 1
    assert len(split.scorers) == (kl > 0)
    assert split.ranks % -(-split.ranks // run.fleet.of_a_node) == 0


@settings(max_examples=histories(15, full=500), deadline=None)
@given(
    st.sampled_from(sorted(PUBLISHED)),
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from(["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", "ZERO1"]),
)
def test_whatever_is_recommended_fits_by_its_own_bill(model, nodes, parallel, kl, sharding):
    devices = ",".join(map(str, nodes))
    run = asked(
        model, devices=devices, tensor_parallel=parallel, kl=kl, fsdp_sharding_strategy=sharding
    )
    try:
        check_fits(run)
        split = fastest(run, predict=at_once).split
    except ConfigError:
        return
    assert all(each.bill.total <= each.room for each in bills_of(run, split) if each.room)
    assert run.devices_of(split) <= sum(nodes) and min(split.engines, split.ranks) >= 1
    machines = -(-split.ranks // max(nodes))
    assert split.ranks % machines == 0
    left = [
        node - split.ranks // machines * (number < machines)
        for number, node in enumerate(sorted(nodes, reverse=True))
    ]
    assert min(left) >= 0 and sum(each // parallel for each in left) >= split.engines


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-4b", "qwen2.5-7b"]),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([(0.55, 0.35), (0.3, 0.6), (0.7, 0.2)]),
    st.sampled_from([2048, 8192]),
)
def test_shares_of_a_device_are_planned_only_where_each_fits_its_own(model, kind, shares, tokens):
    run = asked(model, devices=f"1x{kind}", max_tokens_per_gpu=tokens, gpus_per_rank=shares[0])
    engine = replace(run.workers[0], num_workers=1, gpus_per_worker=shares[1])
    run = replace(run, workers=(engine,), num_ranks=1)
    try:
        check_fits(run)
    except ConfigError:
        bills = bills_of(run, run.own_split)[:2]
        lacks = cached_tokens(run.model, engine_of(run, 0)) < run.longest[0]
        assert lacks or any(each.bill.total > each.room for each in bills)
        return
    split = search(work(run), run, bounds=(1,), predict=at_once).best.split
    bills = bills_of(run, split)[:2]
    assert split == run.own_split and all(each.bill.total <= each.room for each in bills)
    assert sum(each.room for each in bills) <= run.fleet.kind.memory_bytes


def test_copies_of_the_model_are_a_machine_s_own_however_many_devices_it_has():
    sharding = {"fsdp_sharding_strategy": "HYBRID_SHARD", "batch_size": 16}
    for devices, split in (("6", Split(1, 5)), ("6,6", Split(2, 10))):
        run = asked("qwen2.5-14b", devices=devices, **sharding)
        assert fewest_ranks(run) == 5 and fastest(run, predict=at_once).split == split


def test_ranks_that_rounding_left_too_few_are_looked_at_again():
    run = asked("qwen2.5-32b", devices="16", tensor_parallel=2, max_tokens_per_gpu=8192)
    # Six on each machine: eight do not fit.
    assert fastest(run, predict=at_once).split == Split(2, 12)


def test_too_few_devices_are_refused_with_what_would_do():
    run = asked("llama-3.3-70b", devices="32", tensor_parallel=8, max_tokens_per_gpu=8192)
    with pytest.raises(ConfigError) as caught:
        fastest(run)
    said = str(caught.value)
    assert said.startswith("--devices 32 are too few for 26 trainer rank(s)")
    enough = int(said.partition("give ")[2].partition(",")[0])
    assert most_engines(asked("llama-3.3-70b", devices=str(enough), tensor_parallel=8,
                              max_tokens_per_gpu=8192)) == 1  # fmt: skip
    for option in ({"max_tokens_per_gpu": 4096}, {"offload": "optimizer"}):
        assert str(next(iter(option.values()))) in said
        assert most_engines(with_train(run, **option)) >= 1


def test_weights_of_a_single_machine_travel_through_its_memory():
    one, two = (asked("qwen2.5-7b", devices=devices) for devices in ("8", "8,8"))
    sync = work(one)(Split(4, 4)).rates.sync
    here, own = sync.transfer_s, 2 * one.model.num_parameters / 4
    assert sync.gather_s + here == pytest.approx(own / PACK_BYTES_PER_S)
    assert here == pytest.approx(NUM_HOST_BUFFERS * BUCKET_BYTES / PACK_BYTES_PER_S)
    assert work(two)(Split(8, 8)).rates.sync.transfer_s > here
    by_nccl = with_train(one, weight_transport="nccl"), with_train(two, weight_transport="nccl")
    inside, between = (work(each)(Split(4, 4)).rates.sync.transfer_s for each in by_nccl)
    assert inside < between


def test_engines_of_several_devices_are_whole():
    run = asked("qwen2.5-32b", devices="20", tensor_parallel=4, batch_size=16)
    split = fastest(run).split
    assert split.engines >= 1 and split.ranks + 4 * split.engines <= 20


def test_fewer_devices_than_roles_are_refused():
    run = replace(asked("qwen2.5-1.5b"), fleet=Fleet((1,), H100))
    with pytest.raises(ConfigError, match=r"--devices 1 are too few for 1 trainer rank.*give 2"):
        fastest(run)


def test_the_smallest_staleness_that_is_nearly_the_best_is_recommended():
    run = asked("qwen2.5-1.5b", devices="8", batch_size=16)
    found = search(work(run), run)
    assert [each.max_staleness for each in found.curve] == [0, 1, 2, 4]
    top = max(each.samples_per_s for each in found.curve)
    assert found.best.samples_per_s >= 0.95 * top
    lower = [each for each in found.curve if each.max_staleness < found.best.max_staleness]
    assert all(each.samples_per_s < 0.95 * top for each in lower)


def test_a_deterministic_run_stays_at_its_staleness():
    run = asked("qwen2.5-1.5b", devices="4", batch_size=16, max_staleness=0, deterministic=True)
    found = search(work(run), run)
    assert [each.max_staleness for each in found.curve] == [0] and not found.best.max_staleness
    assert scenario_of(work(run)(Split(2, 2)), Split(2, 2), max_staleness=0)[0].waits_for_step


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_whole_turns_of_the_batches_that_are_on_their_way_together_are_measured(bound):
    """Their steps alternate: a part of a turn would be told as the whole of it."""
    given, split = work(asked("qwen2.5-1.5b", devices="8"))(Split(4, 4)), Split(4, 4)
    scenario, _ = scenario_of(given, split, max_staleness=bound)
    measured = scenario.num_batches - WARM_UP - 2 * bound - 1
    assert measured >= 2 and measured % (bound + 1) == 0


@pytest.fixture
def on_cores():
    """A run on two cores, with an engine and two ranks."""
    run = asked("smollm2-135m", devices="", batch_size=8, max_generation_tokens=64)
    return replace(run, workers=(replace(run.workers[0], num_workers=1),))


@pytest.mark.parametrize(
    ("cores", "host_bytes", "ranks"),
    [(2, 64 << 30, 2), (2, 1 << 30, 1), (8, 64 << 30, 1), (64, 64 << 30, 7)],
)
def test_on_cores_as_many_ranks_as_fill_them_are_best(cores, host_bytes, ranks, on_cores):
    """Fewer where memory is too small, or where more would leave each process fewer threads."""
    fleet = replace(on_cores.fleet, num_cores=cores, threads=min(8, cores // 2))
    run = replace(on_cores, num_ranks=1, fleet=fleet, host_bytes=host_bytes)
    found = search(work(run, mean=30.0), run, bounds=())
    assert found.as_asked.split == run.own_split
    assert found.best.split == replace(run.own_split, ranks=ranks)
    assert {each.split for each in found.curve} == {found.best.split}


def test_on_cores_the_file_s_ranks_stay_where_they_are_fast_enough(on_cores):
    run = on_cores

    def predict(_, split, *, max_staleness):
        return SimpleNamespace(
            split=split, max_staleness=max_staleness, samples_per_s={1: 1.0, 2: 0.96}[split.ranks]
        )

    assert search(lambda split: None, run, predict=predict).best.split == run.own_split


def test_shared_cores_slow_processes(on_cores):
    run = on_cores
    found = search(work(run, mean=30.0), run, bounds=())
    assert found.best.split == run.own_split and found.best.max_staleness == 1
    assert found.best.slowed > 1
    alone = replace(run, fleet=replace(run.fleet, num_cores=64))
    assert search(work(alone, mean=30.0), alone, bounds=()).best.step_s < found.best.step_s


def test_a_part_of_a_large_run_is_as_fast_as_the_whole():
    run = asked("qwen2.5-1.5b", devices="64", batch_size=512)
    split = Split(32, 32)
    assert part_of(run, split) == 2
    given = work(run)(split)
    part = predict(given, split, max_staleness=1)
    rates = replace(given.rates, control=slower(given.rates.control, 2))
    half = replace(given, asked=with_train(run, batch_size=256), rates=rates)
    half = predict(half, Split(16, 16), max_staleness=1)
    assert part.step_s == pytest.approx(half.step_s, rel=0.02)
    assert part.samples_per_s == pytest.approx(2 * half.samples_per_s, rel=0.02)


def test_a_thinned_batch_keeps_the_time_of_the_whole():
    run = asked("qwen2.5-1.5b", devices="4", batch_size=256, max_generation_tokens=256)
    given = work(run, mean=100.0)(Split(2, 2))
    scenario, _ = scenario_of(given, Split(2, 2), max_staleness=2)
    thin, times = thinned(scenario, most=1024)
    assert times == 2 and thin.batch_size == 128

    def seconds(each):
        return mean(simulate(replace(each, num_batches=5))[3:4], lambda step: step.seconds)

    assert times * seconds(thin) == pytest.approx(seconds(scenario), rel=0.1)
    assert slowed(thin, 2.0).engine.step_s == 2 * thin.engine.step_s
