import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from private_cluster import PrivateCluster, environment

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("rollout", "batching")]
CLUSTER = pytest.StashKey[PrivateCluster]()


@pytest.fixture(scope="session")
def private_cluster(pytestconfig: pytest.Config) -> Iterator[PrivateCluster]:
    """A Ray cluster that only these tests use; give commands `environment()`."""
    cluster = PrivateCluster(env=environment(PYTHONPATH=str(TESTS)))  # where scripted engines are
    pytestconfig.stash[CLUSTER] = cluster
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def ray_cluster(private_cluster: PrivateCluster) -> str:
    """Its host:port."""
    return private_cluster.address


@pytest.fixture
def driver(setup: Any) -> Iterator[None]:
    """This process as a driver of the cluster of a file's `setup`."""
    import ray

    from async_grpo.cluster.cluster import Cluster

    Cluster.join(setup.address, namespace=setup.namespace)
    yield
    ray.shutdown()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster with the last test of this folder: an idle one takes a tenth of a core."""
    is_last = nextitem is None or Path(__file__).parent not in nextitem.path.parents
    if is_last and (cluster := item.config.stash.get(CLUSTER, None)):
        cluster.stop()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random model that every command takes."""
    from tiny_models import make_model

    return make_model(tmp_path_factory.mktemp("tiny-model"), tied=True)


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few one-digit sums, as JSONL."""
    return write_questions(tmp_path_factory.mktemp("questions"), beginning="")


@pytest.fixture(scope="session")
def long_questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same behind a prefix that fills a block of vLLM's cache."""
    return write_questions(tmp_path_factory.mktemp("long-questions"), beginning="0123456789" * 14)


def write_questions(folder: Path, *, beginning: str) -> str:
    file = folder / "questions.jsonl"
    lines = [json.dumps({"input": f"{beginning}{n}+2=", "answer": str(n + 2)}) for n in range(8)]
    file.write_text("\n".join(lines) + "\n")
    return str(file)


@pytest.fixture(scope="session")
def sevens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward adapter, as a user names it: the share of sevens."""
    file = tmp_path_factory.mktemp("rewards") / "sevens.py"
    file.write_text(
        "def sevens(sample, **_):\n"
        "    output = sample['output']\n"
        "    return {'reward': output.count('7') / max(len(output), 1)}\n"
    )
    return f"{file}:sevens"
