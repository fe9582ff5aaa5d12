"""Every command that a page shows is one that its program understands."""

import re

import pytest
from pages import PAGES, ROOT, all_blocks, blocks, tokens
from typed_commands import check, commands

from async_grpo.cli.main import main

BLOCKS = all_blocks("bash")
# Options of others' programs, which pages name in their text.
FOREIGN = {
    "--listen",  # of an agent: in the words of --environment
    *(
        "--address",
        "--cpu",
        "--generate",
        "--gpus",
        "--help",
        "--include-dashboard",
        "--max-restarts",
    ),
    "--metrics-export-port",
    *("--nnodes", "--no-python", "--node-ip-address", "--num-gpus", "--object-store-memory"),
    "--port",
    *("--batch", "--cpus-per-task", "--mem", "--requeue", "--signal"),  # of Slurm
    *("--rdzv-backend", "--rdzv-endpoint", "--shm-size", "--strict"),
}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_every_command_of_a_page_is_understood(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    own = [other.title for other in blocks(block.page) if other.title]
    for command in commands(block.text):
        check(command, own=own)


@pytest.mark.parametrize("block", all_blocks("text"), ids=lambda block: block.place)
def test_no_command_hides_in_a_block_that_nobody_reads(block):
    words = block.text.split(maxsplit=1)
    assert words[0] not in ("async-grpo", "python", "torchrun", "ray", "make"), "fence it as bash"
    assert words[0] not in ("import", "def", "class", "async"), "fence it as python"


def known_options():
    """Every option of every command of ours, scripts and benchmarks included."""
    commands_of_ours = [*main.commands.values(), *main.commands["plot"].commands.values()]
    found = {
        name
        for command in commands_of_ours
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    for folder in ("benchmarks", "sample-data", "tools", "async_grpo/bridges", "tests/page"):
        for file in (ROOT / folder).glob("**/*.py"):
            found |= set(re.findall(r'"(--[a-z][a-z-]+)', file.read_text()))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_option_in_the_text_of_a_page_exists(page):
    spans = [child for token in tokens(page) for child in token.children or ()]
    named = {
        option
        for span in spans
        if span.type == "code_inline"
        for option in re.findall(r"(?<![\w.-])--[a-z][a-z0-9-]++(?!\.)", span.content)
    }
    assert named - known_options() - FOREIGN == set()
