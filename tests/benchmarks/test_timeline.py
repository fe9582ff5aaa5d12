import pytest

from benchmarks.startup import Started, figures_of
from benchmarks.timeline import Timeline


def test_a_line_is_noted_once_it_is_whole(tmp_path):
    now = [1.0]
    log = tmp_path / "log"
    timeline = Timeline({"log": log, "absent": tmp_path / "absent"}, clock=lambda: now[0])
    timeline.look()
    log.write_text("INFO joined\nINFO rea")
    timeline.look()
    now[0] = 2.0
    timeline.look()
    log.write_text("INFO joined\nINFO ready after 3 s\nINFO ready again\n")
    timeline.look()
    assert timeline.first("log", "joined") == (1.0, "INFO joined")
    assert timeline.first("log", "ready") == (2.0, "INFO ready after 3 s")
    with pytest.raises(LookupError, match="absent holds 'ready'"):
        timeline.first("absent", "ready")


def test_times_and_ratios_of_starts_are_medians_of_the_repeats():
    def started(seconds):
        return Started(seconds, {"ray start": 4.0}, {"Ray": 3.0, "trainer": 5.0})

    runs = {
        "one by one": [started(40.0), started(50.0)],
        "at once": [started(30.0), started(40.0)],
    }
    figures = {figure.name: figure for figure in figures_of(runs)}
    assert figures["one by one, command to first optimizer step"].value == 45.0
    assert figures["at once, command to first optimizer step"].goal == 60.0
    assert figures["at once / one by one"].spread == (0.75, 0.8)
    assert figures["at once, CPU in all"].value == 8.0
    assert figures["at once, CPU, trainer"].value == 5.0
