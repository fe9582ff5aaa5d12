"""The rotation of slow tests: who is in it, and what it says of a red file."""

import itertools
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

TOOL = Path(__file__).parents[1] / "tools" / "rotation.py"
ROTATION = runpy.run_path(str(TOOL))


@given(st.lists(st.text("abc/", min_size=1), unique=True))
def test_every_file_is_in_one_tenth(files):
    listed = "".join(f"{file}: 2\n" for file in files)
    tenths = [ROTATION["files_in"](listed, tenth) for tenth in range(10)]
    assert sorted(itertools.chain(*tenths)) == sorted(files)


@given(st.lists(st.integers(0, 2**160 - 1).map("{:040x}".format)), st.integers(0, 9))
def test_the_commit_before_is_the_newest_with_the_same_tenth(commits, tenth):
    found = ROTATION["commit_before"](commits, tenth)
    tried = [commit for commit in commits if ROTATION["tenth_of_commit"](commit) == tenth]
    assert found == (tried[0] if tried else "")


@pytest.mark.parametrize(
    ("body", "limit_s", "said"),
    [
        ("pass", 300.0, ""),
        ("assert False", 300.0, "failed"),
        ("import time; time.sleep(15)", 1.0, "did not end within the 1 s of its tenth"),
        ("pass", 0.0, "was not begun within 0 s"),
    ],
)
def test_a_file_that_fails_or_does_not_end_or_is_not_begun_is_red(body, limit_s, said, tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text(f"import pytest\n@pytest.mark.slow\ndef test_it():\n    {body}\n")
    found = ROTATION["run"]([str(file)], limit_s=limit_s)
    assert found == ({str(file): said} if said else {})
