"""The simulated processes are those that exist: one controller, ranks that store their own rows."""

import click
import pytest

from async_grpo.planning.rates import PACK_BYTES_PER_S, PCIE_SHARE
from async_grpo.weight_sync.buckets import BUCKET_BYTES
from async_grpo.weight_sync.gather import NUM_HOST_BUFFERS
from benchmarks import results
from benchmarks.results import Figure
from benchmarks.scaling import hardware

ROOM = NUM_HOST_BUFFERS * BUCKET_BYTES


def test_ranks_stand_still_for_their_own_share_alone():
    model = hardware.MODELS["7B"]
    own = 2 * 7.62e9 / 28
    assert own < ROOM
    sync = hardware.sync_rates(model, num_ranks=28, engine_nodes=5)
    assert sync.gather_s == pytest.approx(own / (64e9 * PCIE_SHARE))
    few = hardware.sync_rates(model, num_ranks=4, engine_nodes=5)
    assert few.gather_s == pytest.approx((2 * 7.62e9 / 4 - ROOM) / PACK_BYTES_PER_S)
    more = hardware.sync_rates(model, num_ranks=28, engine_nodes=50)
    assert more.transfer_s > sync.transfer_s


def test_the_controller_costs_what_was_measured(tmp_path):
    with pytest.raises(click.ClickException, match=r"control_plane\.json must hold"):
        hardware.control_costs(tmp_path)
    names = (*hardware.PARTS, "a ping")
    figures = [
        Figure(f"{name}, CPU of the controller", 100.0 * (number + 1), "us")
        for number, name in enumerate(names)
    ]
    results.write("control_plane", figures, folder=tmp_path)
    found = hardware.control_costs(tmp_path)
    seconds = (found.group_s, found.sample_s, found.item_s, found.ping_s)
    assert seconds == pytest.approx((1e-4, 2e-4, 3e-4, 4e-4))
