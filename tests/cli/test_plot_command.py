import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from async_grpo.cli.main import main as async_grpo
from async_grpo.cli.use_run import plot_commands as main
from async_grpo.util.errors import DataError
from async_grpo.viewing.curves import Run, make_curves, parse_rows, read_run, values
from async_grpo.viewing.figure import fill


def write_run(folder, values, *, tail="", evaluations=(), options=None):
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step, "avg_reward": value, "entropy": 1.0 - value, "kl": None, "note": "text",
            "seconds": 90.0, "total_seconds": 90.0 * step,
        }
        for step, value in enumerate(values, start=1)
    ]  # fmt: skip
    if options is not None:
        (folder / "training_params.json").write_text(json.dumps(options))
    lines = [
        json.dumps(
            {"step": i, "eval_accuracy": value, "num_correct": 1, "total_seconds": 7200.0 * i}
        )
        for i, value in enumerate(evaluations)
    ]
    if lines:
        (folder / "evaluation_metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = "".join(json.dumps(row) + "\n" for row in rows) + tail
    (folder / "training_metrics.jsonl").write_text(text)
    return str(folder)


def run_plot(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def one_error_line(result):
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def seeds(*curves):
    """Runs named `a`, one a list of rewards, at steps 0, 1, 2, ..."""
    return [
        Run("a", "file", [{"step": i, "avg_reward": value} for i, value in enumerate(values)])
        for values in curves
    ]


def test_a_variable_that_a_run_did_not_measure_costs_its_panel_alone(tmp_path):
    path, output = write_run(tmp_path / "run", [0.1, 0.5, 0.9]), tmp_path / "picture.svg"
    result = run_plot("plot", path, "-v", "kl", "-v", "avg_reward", "-o", output)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("left out: 'kl' has no value in any row of ")
    assert output.exists()


@pytest.mark.parametrize(
    ("extension", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")]
)
def test_a_picture_is_written_in_the_format_of_its_name(tmp_path, extension, start):
    path = write_run(tmp_path / "run", [0.1, 0.5, 0.9])
    output = tmp_path / "new" / f"picture.{extension}"
    result = run_plot("plot", path, "-n", "mine", "-v", "avg_reward", "-s", "-o", output)
    assert result.exit_code == 0, result.output
    assert output.read_bytes().startswith(start)


def test_the_same_runs_give_the_same_file(tmp_path):
    path = write_run(tmp_path / "run", [0.1, 0.5, 0.9])
    outputs = [tmp_path / "1.svg", tmp_path / "2.svg"]
    for output in outputs:
        run_plot("plot", path, "-v", "avg_reward", "-v", "entropy", "-o", output)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_a_file_and_the_folder_of_a_run_are_the_same_path(tmp_path):
    folder = write_run(tmp_path / "run", [0.1, 0.5])
    for name, path in (("1", folder), ("2", f"{folder}/training_metrics.jsonl")):
        run_plot("plot", path, "-n", "x", "-o", tmp_path / f"{name}.svg")
    assert (tmp_path / "1.svg").read_bytes() == (tmp_path / "2.svg").read_bytes()


def test_seeds_of_one_name_are_a_mean_between_minimum_and_maximum():
    (curve,) = make_curves(seeds([0.0, 0.2], [0.4, 1.0], [0.2, 0.3]), x="step", y="avg_reward")
    assert curve.num_seeds == 3
    np.testing.assert_allclose(curve.mean, [0.2, 0.5])
    np.testing.assert_allclose(curve.low, [0.0, 0.2])
    np.testing.assert_allclose(curve.high, [0.4, 1.0])


def names_drawn(*paths):
    """Names in the legend of a picture of these runs, and the note below it."""
    output = Path(paths[0]).parent / "picture.svg"
    result = run_plot(*paths, "-o", output)
    assert result.exit_code == 0, result.output
    return set(re.findall(r"<!-- (run\w*|mean of [^>]*|moving[^>]*) -->", output.read_text()))


def test_runs_that_differ_by_their_seed_alone_are_one_experiment(tmp_path):
    paths = [
        write_run(
            tmp_path / f"run{staleness}_seed{seed}", [0.1, 0.2 * seed, 0.9],
            options={"infinite_sampler_seed": seed, "max_staleness": staleness, "output_dir": seed},
        )
        for staleness in (0, 1) for seed in (1, 2, 3)
    ]  # fmt: skip
    assert names_drawn(*paths) == {"run0", "run1", "mean of 3 seeds, lowest to highest"}
    assert names_drawn(*paths[:2], paths[3]) == {
        "run0", "run1_seed1", "mean of 2 seeds, lowest to highest",
    }  # fmt: skip


@pytest.mark.parametrize("options", [None, {}, {"infinite_sampler_seed": 1}])
def test_runs_of_one_seed_or_of_unknown_options_are_told_apart(tmp_path, options):
    paths = [write_run(tmp_path / f"run{n}", [0.1, 0.5], options=options) for n in "ab"]
    assert names_drawn(*paths) == {"runa", "runb"}


def test_a_band_ends_where_the_shortest_seed_ends():
    (curve,) = make_curves(seeds([0.0, 0.0, 9.0], [1.0, 1.0]), x="step", y="avg_reward")
    np.testing.assert_allclose(curve.x, [0.0, 1.0])
    np.testing.assert_allclose(curve.mean, [0.5, 0.5])


def test_smoothing_is_a_mean_over_the_window_and_keeps_the_raw_points():
    (curve,) = make_curves(
        seeds([0.0, 3.0, 0.0, 3.0, 0.0]), x="step", y="avg_reward", smooth_window=3
    )
    np.testing.assert_allclose(curve.mean, [1.5, 1.0, 2.0, 1.0, 1.5])
    np.testing.assert_allclose(curve.raw[0][1], [0.0, 3.0, 0.0, 3.0, 0.0])


def test_rows_without_the_variable_are_left_out_not_drawn_as_zero():
    rows = [{"step": 1, "kl": 0.5}, {"step": 2, "kl": None}, {"step": 3, "kl": 0.7}]
    (curve,) = make_curves([Run("a", "file", rows)], x="step", y="kl")
    np.testing.assert_allclose(curve.x, [1.0, 3.0])


def test_a_half_written_last_line_is_left_out_with_a_warning(caplog):
    assert parse_rows('{"step": 1}\n{"step": 2, "av', "file") == [{"step": 1}]
    assert "file ends in a half-written line" in caplog.text


def test_a_broken_line_elsewhere_is_an_error_with_its_number():
    with pytest.raises(DataError, match="file line 2 is not JSON"):
        parse_rows('{"step": 1}\n{"st\n{"step": 3}\n', "file")


def test_variables_are_listed_with_values_and_meaning(tmp_path):
    path = write_run(tmp_path / "run", [0.5, 0.1, 0.25], evaluations=[0.2, 0.4])
    result = run_plot("list", path)
    assert result.exit_code == 0
    header, *lines = (line.split() for line in result.stdout.splitlines())
    assert header == ["first", "last", "lowest", "highest"]
    assert [line[0] for line in lines] == [
        "step", "avg_reward", "entropy", "seconds", "total_seconds", "eval_accuracy",
    ]  # fmt: skip
    assert lines[1][1:5] == ["0.5", "0.25", "0.1", "0.5"]
    assert " ".join(lines[1][5:]) == "reward of a sample, as its verifier gave it"
    assert lines[5][1:5] == ["0.2", "0.4", "0.2", "0.4"]


def test_a_path_alone_is_plotted(tmp_path):
    path = write_run(tmp_path / "run", [0.1, 0.5])
    for output, arguments in (("1.svg", ["plot", path]), ("2.svg", [path])):
        assert run_plot(*arguments, "-o", tmp_path / output).exit_code == 0
    assert (tmp_path / "1.svg").read_bytes() == (tmp_path / "2.svg").read_bytes()
    listed = CliRunner().invoke(async_grpo, ["plot", "list", path])
    assert "avg_reward" in listed.stdout


def test_evaluations_are_curves_over_what_their_rows_hold(tmp_path):
    run = read_run(write_run(tmp_path / "run", [0.1], evaluations=[0.2, 0.4, 0.3]), name="a")
    (curve,) = make_curves([run], x="hours", y="eval_accuracy", smooth_window=3)
    np.testing.assert_allclose(curve.x, [0.0, 2.0, 4.0])
    np.testing.assert_allclose(curve.mean, [0.2, 0.4, 0.3])
    assert "num_correct" not in values(run)


@pytest.mark.parametrize(("x", "places"), [("seconds", [90, 180]), ("minutes", [1.5, 3.0])])
def test_an_axis_of_time_is_the_run_s_and_not_the_step_s(tmp_path, x, places):
    run = read_run(write_run(tmp_path / "run", [0.1, 0.5]), name="a")
    (curve,) = make_curves([run], x=x, y="avg_reward")
    np.testing.assert_allclose(curve.x, places)


def labels_of(*runs):
    """(x, offset in points) of each curve's label in a picture of these (steps, values)."""
    made = [
        Run(str(i), "file", [{"step": s, "avg_reward": v} for s, v in zip(*run, strict=True)])
        for i, run in enumerate(runs)
    ]
    panels = {"avg_reward": make_curves(made, x="step", y="avg_reward")}
    fill(figure := Figure(), panels, x="step")
    (axes,) = figure.axes
    return [(label.xy[0], label.get_position()[1]) for label in axes.texts]


def test_a_label_stands_where_its_line_ends():
    assert labels_of(([0, 5], [0.0, 0.5]), ([0, 90], [0.0, 0.5])) == [(5, 0), (90, 0)]


def test_labels_of_lines_that_end_together_are_moved_apart():
    (_, low), (_, high) = labels_of(([0, 90], [0.0, 0.5]), ([0, 90], [1.0, 0.5]))
    assert high - low == pytest.approx(10.0)


def test_labels_of_a_crowded_panel_stay_beside_it():
    made = [
        Run(str(i), "file", [{"step": s, "avg_reward": s / 9 - i / 500} for s in range(10)])
        for i in range(8)
    ]
    panels = {"avg_reward": make_curves(made, x="step", y="avg_reward")}
    fill(figure := Figure(), panels, x="step")
    (axes,) = figure.axes
    middles = [(box.y0 + box.y1) / 2 for box in (text.get_window_extent() for text in axes.texts)]
    assert len(middles) == 8
    assert axes.bbox.y0 - 2 <= min(middles) and max(middles) <= axes.bbox.y1 + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "-v", "avg_rewrad"], "no variable 'avg_rewrad': did you mean avg_reward?"),
        (["{run}", "-v", "zzz"], "no variable 'zzz': `plot list {run}` prints those it has"),
        (["{run}", "-v", "mean_reward"], "'mean_reward': did you mean avg_reward?"),
        (["{run}", "-x", "zzz"], "no variable 'zzz'"),
        (["{run}", "-v", "kl"], "'kl' has no value in any row"),
        (["{run}", "-n", "a", "-n", "b"], "-n must be given once for each PATH (1), got 2"),
        (["{run}", "-o", "picture.gif"], "-o must end in .svg, .png, .pdf, got 'picture.gif'"),
        (["{tmp}/nowhere"], "nowhere (no such file or directory): give a metrics file"),
        (["{tmp}"], "training_metrics.jsonl (no such file or directory)"),
        (["{tmp}/empty.jsonl"], "empty.jsonl has no rows yet"),
        (["{run}", "-o", "{tmp}/empty.jsonl/a.svg"], "choose another -o"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, arguments, message):
    run = write_run(tmp_path / "run", [0.1, 0.5])
    (tmp_path / "empty.jsonl").write_text("")
    filled = [argument.format(run=run, tmp=tmp_path) for argument in arguments]
    if "-o" not in filled:
        filled += ["-o", str(tmp_path / "out.svg")]
    assert message.format(run=run) in one_error_line(run_plot("plot", *filled))
    assert not (tmp_path / "out.svg").exists()


@pytest.fixture
def fake_ssh(tmp_path, monkeypatch):
    """An ssh that runs the command here, and writes down how it was called."""
    script = tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/call\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("path", ["~/my run", "~/my run/training_metrics.jsonl", "{tmp}/my run"])
def test_a_remote_run_is_read_over_ssh(fake_ssh, path):
    write_run(fake_ssh / "my run", [0.1, 0.5], evaluations=[0.3], options={"max_staleness": 2})
    run = read_run(path.format(tmp=fake_ssh), name="a", remote="node7")
    assert run.options == {"max_staleness": 2}
    result = run_plot("list", path.format(tmp=fake_ssh), "--remote", "node7")
    assert result.exit_code == 0, result.output
    assert "avg_reward" in result.stdout
    assert "eval_accuracy" in result.stdout
    assert "-- node7" in (fake_ssh / "call").read_text()


def test_a_remote_path_cannot_smuggle_a_command(fake_ssh):
    run_plot("list", f"x; touch {fake_ssh}/owned", "--remote", "node7")
    assert not (fake_ssh / "owned").exists()


def test_a_remote_without_the_file_is_one_clear_line(fake_ssh):
    line = one_error_line(run_plot("list", "nowhere", "--remote", "node7"))
    assert "cannot read nowhere on node7" in line


def test_help_does_not_import_matplotlib_or_numpy():
    code = (
        "import sys, async_grpo.cli.use_run as p\n"
        "try: p.plot_commands(['plot', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'matplotlib', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0


def test_the_shim_at_the_top_is_the_command(tmp_path):
    shim = Path(__file__).parents[2] / "plot.py"
    path = write_run(tmp_path / "run", [0.1, 0.5])
    done = subprocess.run(
        [sys.executable, str(shim), "list", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "avg_reward" in done.stdout


def test_without_options_the_panels_are_those_that_all_runs_have(tmp_path):
    paths = [
        write_run(tmp_path / "a", [0.1, 0.5], evaluations=[0.2, 0.4]),
        write_run(tmp_path / "b", [0.1, 0.5]),
    ]
    for chosen, titles in ((paths[:1], ["Held-out accuracy"]), (paths, [])):
        assert run_plot(*chosen, "-o", tmp_path / "x.svg").exit_code == 0
        drawn = (tmp_path / "x.svg").read_text()
        found = re.findall(r"<!-- (Mean reward|Held-out accuracy|Entropy|Gradient norm)", drawn)
        assert found == ["Mean reward", *titles, "Entropy"]


def test_many_points_are_smoothed_unless_it_is_refused(tmp_path):
    noisy = [index % 2 for index in range(100)]
    path, pictures = write_run(tmp_path / "run", noisy), []
    for options in ((), ("--smooth",), ("--no-smooth",)):
        output = tmp_path / "x.svg"
        assert run_plot(path, *options, "-o", output).exit_code == 0
        pictures.append(output.read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]
