"""What the comparison with TRL makes of its runs."""

import json
import os

import pytest

from benchmarks.end_to_end import measures
from benchmarks.end_to_end.systems import Run, Step, as_step
from benchmarks.end_to_end.task import SIZES, Setting, Task
from benchmarks.end_to_end.trl_train import as_prompt, grade
from benchmarks.end_to_end.watch import Note


def _run(*, num_steps=10, seconds_per_step=2.0, start_up_s=30.0, rewards=None):
    """Steps of equal length after a start-up; 3 CPU seconds a step, the start-up's aside."""
    rewards = rewards or [0.5] * num_steps
    rows = [Step(reward, samples=8, tokens=80.0, trained_tokens=40.0) for reward in rewards]
    notes = [
        Note(number, start_up_s + number * seconds_per_step, {"trainer": 50 + 3.0 * number})
        for number in range(1, len(rows) + 1)
    ]
    return Run(rows, notes, peak_memory_bytes=2**30)


def test_rates_are_those_of_the_steady_part():
    found = measures.rates(_run())
    assert found.samples_per_s == pytest.approx(8 / 2)
    assert found.tokens_per_s == pytest.approx(80 / 2)
    assert found.trained_tokens_per_s == pytest.approx(40 / 2)
    assert found.cpu_ms_per_sample == pytest.approx(3000 / 8)
    assert found.busy_cores == pytest.approx(3.0 / 2.0 / os.cpu_count())
    assert found.cpu_s_per_step == {"trainer": pytest.approx(3.0)}
    assert found.peak_memory_gib == 1.0


def test_a_slow_first_step_and_a_hasty_end_change_no_rate():
    run = _run()
    first, *middle, last = run.notes
    moved = [
        Note(1, first.seconds - 20, first.cpu_seconds),
        *middle,
        Note(last.num_rows, last.seconds - 1.9, last.cpu_seconds),
    ]
    assert measures.rates(Run(run.rows, moved, 0)).samples_per_s == pytest.approx(8 / 2)


def test_rows_that_were_seen_together_are_counted_with_their_time():
    run = _run()
    notes = [note for note in run.notes if note.num_rows not in (4, 5)]
    assert measures.rates(Run(run.rows, notes, 0)).samples_per_s == pytest.approx(8 / 2)


def test_the_threshold_is_reached_by_a_mean_of_steps_and_timed_by_its_row():
    rewards = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    found = measures.learned(_run(rewards=rewards))
    assert (found.steps, found.seconds, found.seconds_in_all) == (6, 10.0, 42.0)
    assert measures.learned(_run(rewards=[0.89] * 9)).steps is None


def test_figures_are_ratios_of_the_same_turn_by_the_best_of_trl():
    speeds = {"ours": (6.0, 20.0), "slow": (1.0, 1.0), "trl": (2.0, 10.0)}
    records = [
        {"kind": "rates", "system": name, "setting": "natural", "turn": turn}
        | dict.fromkeys(("tokens_per_s", "busy_cores", "cpu_ms_per_sample", "peak_memory_gib"), 1.0)
        | {"samples_per_s": value, "trained_tokens_per_s": 0.25}
        for name, values in speeds.items()
        for turn, value in enumerate(values)
    ]
    by_name = {figure.name: figure for figure in measures.figures_of(records)}
    ratio = by_name["natural, samples, ours / TRL's best"]
    assert (ratio.value, ratio.spread, ratio.goal) == (2.5, (2.0, 3.0), 2.0)
    assert by_name["natural, share of its output tokens that ours trains"].value == 0.25


def test_a_seed_that_missed_the_threshold_is_told_and_leaves_no_times():
    def record(system, turn, steps):
        times = {"seconds": steps and 2.0 * steps, "seconds_in_all": steps and 3.0 * steps}
        place = {"kind": "learned", "system": system, "setting": "threshold", "turn": turn}
        return place | {"steps": steps} | times

    complete = [record("ours", 0, 10), record("trl", 0, 20), record("ours", 1, 10)]
    names = {f.name: f.value for f in measures.figures_of([*complete, record("trl", 1, 40)])}
    assert names["to reward 0.9, time after start-up, ours / TRL's best"] == pytest.approx(0.375)
    names = {f.name: f.value for f in measures.figures_of([*complete, record("trl", 1, None)])}
    assert names["to reward 0.9, trl, seeds that reached it"] == 0.5
    assert not any("/ TRL's best" in name for name in names)


def test_trl_is_asked_the_questions_of_our_stream_and_graded_by_our_adapter(tmp_path):
    from async_grpo.verification.graders.shipped import countdown

    lines = [
        {"input": f"use 1 2 3 to make {target}\n", "nums": [1, 2, 3], "target": target}
        for target in range(7)
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    task = Task("model", str(file), num_steps=4, questions_per_step=4, seed=5)
    asked = task.asked()
    assert len(asked) == 16
    epoch = sorted(line["target"] for line in asked[:7])
    assert epoch == list(range(7))
    texts = ["1+2+3=6", "1+2=3", "nothing"]
    prompts = [as_prompt(lines[6])] * 3
    assert grade([""], nums=[[1, 2, 3]], target=[6]) == [0.0]  # ours calls it unscorable
    given = grade(texts, nums=[p["nums"] for p in prompts], target=[p["target"] for p in prompts])
    ours = [countdown({"output": text, **lines[6]})["reward"] for text in texts]
    assert given == ours
    assert given[0] == 1.0


def test_a_row_of_our_metrics_is_read_as_a_step():
    row = {
        "avg_reward": 0.25, "num_samples": 8, "avg_output_tokens": 10.0, "trained_tokens": 60,
    }  # fmt: skip
    assert as_step(row) == Step(0.25, 8, 80.0, 60)


@pytest.mark.parametrize("size", ["", *SIZES])
@pytest.mark.parametrize("lengths", ["natural", "fixed"])
@pytest.mark.parametrize("rest", ["", " with KL", " with KL of 4", " of 2"])
def test_a_setting_is_what_its_name_says(size, lengths, rest):
    name = f"{size} {lengths}{rest}".strip()
    setting = Setting.read(name)
    assert setting.name == name
    assert (setting.size, setting.even) == (size, lengths == "fixed")
    assert setting.samples_per_question == (int(rest[-1]) if " of " in rest else 8)
    assert setting.kl == ("KL" in rest)


@pytest.mark.parametrize(
    "name", ["", "20M", "natural of 8", "7M natural", "natural with", "fixed of x"]
)
def test_what_is_no_setting_is_refused(name):
    with pytest.raises(ValueError, match="a setting must be"):
        Setting.read(name)
