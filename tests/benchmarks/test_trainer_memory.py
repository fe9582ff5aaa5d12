"""The memory of trainer ranks, looked at from outside, beside its bounds."""

import pytest

from benchmarks.trainer_memory import OFF, ON, Case, figures_of, measure

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_rank_that_loads_holds_its_shard_one_and_a_half_units_and_half_a_gigabyte(
    num_ranks, tmp_path
):
    measured = measure(Case("135M", num_ranks), tmp_path)
    shard = 4 * measured.model.num_parameters / num_ranks
    assert 0.95 * shard < measured.loading <= measured.bound(num_ranks)


@pytest.mark.parametrize(
    "case",
    [
        Case("31M", 1, num_tokens=1024, options=(OFF,)),
        Case("31M", 1, num_tokens=2048, options=(ON,)),
        Case("31M", 2, num_tokens=1024, options=(OFF, ("fsdp_sharding_strategy", "SHARD_GRAD_OP"))),
        Case("31M", 2, num_tokens=1024, options=(OFF, ("fsdp_sharding_strategy", "ZERO1"))),
        Case("31M", 1, num_tokens=1024, options=(OFF,), saves=True),
        Case("31M", 2, num_tokens=1024, options=(OFF, ("offload", "optimizer")), saves=True),
    ],
    ids=lambda case: case.name,
)
def test_a_rank_that_trains_holds_what_its_bill_says(case, tmp_path):
    measured = measure(case, tmp_path)
    assert measured.training == pytest.approx(measured.billed, rel=0.1)
    assert figures_of(case, measured)[1].value == measured.training / measured.billed
