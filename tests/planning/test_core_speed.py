"""A machine's cores are measured once, and what was measured is kept in the user's caches."""

import os

import pytest

from async_grpo.planning.cores import Speed, measured, read_speed


def test_a_machine_is_measured_once_for_each_number_of_threads(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []
    monkeypatch.setattr("async_grpo.planning.cores.measured", lambda threads: measure(threads))

    def measure(threads):
        asked.append(threads)
        return Speed(1e9 * threads, 2e9)

    speeds = [read_speed(threads=number) for number in (1, 2, 1, 2)]
    assert asked == [1, 2] and speeds == [Speed(1e9, 2e9), Speed(2e9, 2e9)] * 2
    [file] = (tmp_path / "async_grpo").iterdir()
    file.write_text("{")
    assert read_speed(threads=1) == speeds[0] and asked == [1, 2, 1]


@pytest.mark.skipif(not os.geteuid(), reason="root may write everywhere")
def test_a_cache_that_takes_no_file_costs_a_measurement_only(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("async_grpo.planning.cores.measured", lambda _: Speed(1.0, 2.0))
    tmp_path.chmod(0o500)
    assert read_speed(threads=1) == Speed(1.0, 2.0)


def test_cores_compute_as_cores_do(monkeypatch):
    monkeypatch.setattr("async_grpo.planning.cores.MEASURED_S", 0.05)
    speed = measured(1)
    assert 1e8 < speed.flops < 1e13 and 1e7 < speed.bytes_per_s < 1e12
