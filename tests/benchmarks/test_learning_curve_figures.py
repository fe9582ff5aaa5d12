import pytest

from benchmarks.learning_curves import WALL_CLOCK, draw, figures_of, learned, with_wall_clock


def rows(rewards, *, seconds):
    return with_wall_clock([{"avg_reward": reward, "seconds": seconds} for reward in rewards])


RISING = [0.1] * 5 + [0.9] * 15


def test_the_threshold_is_reached_by_the_mean_of_five_batches():
    run = learned(rows(RISING, seconds=2.0), threshold=0.7)
    # 0.1 + 4 * 0.9 over 5 is 0.74, after 9 batches; one batch earlier it is 0.58.
    assert run.threshold == (9, 18.0)
    assert run.final_reward == pytest.approx(0.9)
    assert run.seconds == pytest.approx(40.0)


def test_a_threshold_that_is_not_reached_has_no_time():
    assert learned(rows(RISING, seconds=1.0), threshold=0.95).threshold is None


def test_bounds_are_compared_seed_by_seed():
    curves = {
        "staleness 0": [rows(RISING, seconds=2.0), rows(RISING, seconds=4.0)],
        "staleness 1": [rows(RISING, seconds=1.0), rows(RISING, seconds=3.0)],
    }
    figures = {(figure.name, figure.unit): figure for figure in figures_of(curves)}
    ratio = figures["staleness 1, time to reward 0.8 / staleness 0's", "fraction"]
    assert ratio.spread == (0.5, 0.75)
    assert figures["staleness 1, to reward 0.8", "batches"].value == 10
    assert figures["staleness 0, to reward 0.8", "s"].spread == (20.0, 40.0)


def test_a_bound_that_misses_the_threshold_is_not_given_a_time():
    curves = {
        "staleness 0": [rows(RISING, seconds=2.0)],
        "staleness 1": [rows([0.5] * 20, seconds=1.0)],
    }
    names = [figure.name for figure in figures_of(curves)]
    assert "staleness 0, to reward 0.8" in names
    assert not [name for name in names if name.startswith("staleness 1") and "0.8" in name]


def test_the_picture_shows_seeds_over_wall_clock(tmp_path):
    curves = {bound: [rows(RISING, seconds=1.0 + seed) for seed in (0, 1)] for bound in "01"}
    draw(curves, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    assert WALL_CLOCK in curves["0"][0][0]
