import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from ports import listening_sockets

from async_grpo.loopback import keep_stores_to_loopback


@pytest.fixture
def kept(monkeypatch):
    for name in ("torch.distributed", "torch.distributed.rendezvous"):
        monkeypatch.setattr(sys.modules[name], "TCPStore", dist.TCPStore)  # put back afterwards
    keep_stores_to_loopback()


def address_of(port):
    return {address for address, listening in listening_sockets().values() if listening == port}


def test_a_store_for_this_machine_listens_on_no_other_interface(kept):
    keep_stores_to_loopback()  # twice is once
    store = dist.TCPStore("localhost", 0, 1, True, timedelta(seconds=30), wait_for_workers=False)
    assert address_of(store.port) == {"127.0.0.1"}
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_without_it_torch_listens_everywhere():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert address_of(store.port) == {"*"}
