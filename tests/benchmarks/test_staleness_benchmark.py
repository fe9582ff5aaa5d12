"""The benchmark on the real stack, at its smallest: it ends, tells, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
]

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def benchmark(tmp_path):
    """The benchmark, running; at the latest it ends with the test, and so does all it started."""
    command = [
        *(sys.executable, "-m", "benchmarks.staleness", "--staleness", "0,1", "--repeats", "1"),
        *("--batches", "6", "--lengths", "natural"),
        *("--output-dir", str(tmp_path / "runs"), "--results-dir", str(tmp_path)),
    ]
    environment = os.environ | {"BENCHMARK_UNDER_TEST": str(tmp_path)}
    with (tmp_path / "out.txt").open("w") as out:
        child = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    yield child
    child.send_signal(signal.SIGTERM)
    child.wait(60)


@pytest.mark.timeout(900)
def test_two_bounds_are_measured_and_no_process_is_left(benchmark, tmp_path):
    code = benchmark.wait(800)
    out = (tmp_path / "out.txt").read_text()
    assert code == 0, out
    assert not having_in_environment(f"BENCHMARK_UNDER_TEST={tmp_path}")
    content = json.loads((tmp_path / "staleness.json").read_text())
    values = {figure["name"]: figure["value"] for figure in content["figures"]}
    for bound in (0, 1):
        assert values[f"natural, staleness {bound}, wall time"] > 0
        assert 0 <= values[f"natural, staleness {bound}, trainer idle"] < 1
    # The tiny model ends its outputs itself: about 12 of 64 tokens, in 256 samples.
    tokens = [float(line.split()[-2]) for line in out.splitlines() if " #0 " in line]
    assert len(tokens) == 2 and all(1_500 < count < 8_000 for count in tokens)


def having_in_environment(marker):
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found
