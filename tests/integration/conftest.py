from collections.abc import Iterator

import pytest
from private_cluster import PrivateCluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """host:port of a Ray cluster that only these tests use; give commands `environment()`."""
    cluster = PrivateCluster()
    try:
        yield cluster.address
    finally:
        cluster.stop()
