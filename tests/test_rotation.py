"""The rotation of slow tests: who is in it, and what it says of a red file."""

import itertools
import runpy
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

TOOL = Path(__file__).parents[1] / "tools" / "rotation.py"
ROTATION = runpy.run_path(str(TOOL))
TESTS = {"test_a.py": "", "test_b.py": "assert False", "test_c.py": "import time; time.sleep(60)"}


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


def test_a_file_that_fails_or_does_not_end_or_is_not_begun_is_red(tmp_path):
    for name, body in TESTS.items():
        text = f"import pytest\n@pytest.mark.slow\ndef test():\n    {body or 'pass'}\n"
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in (*TESTS, "test_a.py")]
    found = ROTATION["run"](files, limit_s=8)
    assert [words.split(" within")[0] for words in found.values()] == [
        "failed", "did not end", "was not begun",
    ]  # fmt: skip
    assert [Path(file).name for file in found] == ["test_b.py", "test_c.py", "test_a.py"]
