"""The one door: what it shows, and how fast."""

import resource
import subprocess
import sys

from click.testing import CliRunner

from async_grpo.cli.main import HEADINGS, main

HEAVY = {"ray", "torch", "vllm", "transformers", "datasets", "matplotlib"}
MAX_CPU_S = 1.0  # 0.3 s on an EPYC core


def test_every_command_stands_under_a_heading_with_its_sentence():
    shown = CliRunner().invoke(main, ["--help"], terminal_width=100).stdout
    told = {name for name in main.commands if f"\n  {name} " in shown}
    assert told == {name for name, command in main.commands.items() if not command.hidden}
    for heading, commands in HEADINGS.items():
        section = shown.partition(f"{heading}:\n")[2].partition("\n\n")[0]
        names = [line.split()[0] for line in section.splitlines() if line[2] != " "]
        assert names == [each.name for each in commands]
    assert "..." not in shown.partition("[ARGS]...")[2]  # of a sentence that is cut


def test_a_command_under_no_heading_is_shown_last(monkeypatch):
    monkeypatch.delitem(HEADINGS, "Use a model")
    shown = CliRunner().invoke(main, ["--help"], terminal_width=100).stdout
    others = shown.partition("Others:\n")[2]
    assert [line.split()[0] for line in others.splitlines()][-2:] == ["quantize", "serve"]


def test_help_costs_less_than_a_second_and_imports_nothing_heavy():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import sys; from async_grpo.cli.main import main; main(['--help'], standalone_mode=False)"
    )
    told = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MAX_CPU_S
    assert not HEAVY & set(told.splitlines()[-1].split())


def test_a_start_imports_no_gateway_that_it_does_not_run_and_checks_nothing_heavy_first():
    """OpenAI's types take most of a second, in `launch` before Ray begins, and in every rank."""
    code = (
        "import sys, async_grpo.cli.main, async_grpo.check.checks\n"
        f"print(sorted({HEAVY | {'openai'}!r} & set(sys.modules)))\n"
        "import async_grpo.run.loop\n"
        "print('openai' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
