"""The scripted engines of the benchmark do the work that is asked, whatever the leases are."""

import pytest

from async_grpo.planning import clock
from benchmarks import leased_places
from benchmarks.leased_places import CUTS, FEW, SINGLE, WHOLE, Shape, sample

SHAPE = Shape(8, 4, 40)


@pytest.mark.parametrize("kind", [WHOLE, CUTS, FEW, SINGLE])
def test_each_output_holds_a_place_once_and_no_engine_has_more_than_its_places(kind):
    outcome = clock.run(sample(SHAPE, kind, seed=1))
    num_groups = SHAPE.outputs_a_place * leased_places.NUM_ENGINES * 8 // SHAPE.group_size
    lengths = sorted(
        leased_places.num_tokens(1, ordinal, index)
        for ordinal in range(num_groups)
        for index in range(SHAPE.group_size)
    )
    held = [place for places in outcome.held for place in places]
    spent = sorted(round((end - start) * leased_places.TOKENS_A_SECOND) for start, end in held)
    assert spent == lengths
    for places in outcome.held:
        changes = sorted([(s, 1) for s, _ in places] + [(e, -1) for _, e in places])
        num, most = 0, 0
        for _, change in changes:
            num += change
            most = max(most, num)
        assert most == SHAPE.num_places


def test_cuts_leave_fewer_places_idle_than_whole_groups_and_no_fewer_than_the_bound():
    whole, cuts, single = (clock.run(sample(SHAPE, kind, seed=0)) for kind in (WHOLE, CUTS, SINGLE))
    assert whole.idle > 0.2 > cuts.idle >= single.idle
    assert cuts.seconds < 0.9 * whole.seconds
