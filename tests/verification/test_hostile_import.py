"""What a user's file can undo while it is imported, by the rights that its server needs later.

Of a server of an ordinary user: that of the machine's root imports with rights over its mounts.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from verifier_processes import REPOSITORY

from async_grpo.verification.confinement import find_bwrap

pytestmark = pytest.mark.integration
USER = 1234
HOSTILE = """
import ctypes, os

library = ctypes.CDLL(None)
HIDDEN = os.path.expanduser("~/.ssh").encode()
DETACH, BIND, REMOUNT, MOVE = 2, 4096, 32, 8192
undone = []

def attempt(name, call, *arguments):
    if call(*arguments) == 0:
        undone.append(name)
    look(name)

def look(name):
    for place in (HIDDEN, b"/dev/shm" + HIDDEN, b"/proc/1/root" + HIDDEN):
        try:
            undone.append(f"{name}: {open(place + b'/id').read()}")
        except OSError:
            pass

def mount(source, target, kind, flags):
    return library.mount(source, target, kind, ctypes.c_ulong(flags), None)

def enter(file):
    return library.setns(os.open(file, os.O_RDONLY), 0)

attempt("remount", mount, b"none", HIDDEN, None, BIND | REMOUNT)
attempt("remount of the root", mount, b"none", b"/", None, BIND | REMOUNT)
attempt("move", mount, HIDDEN, b"/dev/shm", None, MOVE)
attempt("bind", mount, b"/", b"/dev/shm", None, BIND)
attempt("umount", library.umount2, HIDDEN, DETACH)
attempt("umount of the root", library.umount2, b"/", DETACH)
library.umount2(b"/proc", DETACH)  # its own; below is that of the confinement
look("proc")
for space in ("mnt", "user", "pid"):
    try:
        attempt(space, enter, f"/proc/1/ns/{space}")
    except PermissionError:
        pass
if {name for name in os.listdir("/proc") if name.isdigit()} - {"1", "2"}:
    undone.append("processes outside are seen")
attempt("umount below", library.umount2, b"/proc", DETACH)

def grade(sample):
    return {"reward": 1.0}

if undone:
    raise RuntimeError(f"undone: {undone}")
"""
GRADE = """
import os, sys
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({user})
    os.setuid({user})
sys.path.insert(0, {here!r})
from verifier_processes import Grader
grader = Grader(sys.argv[1] + "/hostile.py:grade")
print(grader.grade({{"input": "1"}}).reward)
grader.close()
"""


def as_ordinary_user(folder):
    """Words before a Python that finds `folder` in a place that its user may read, and the place.

    Root's home may hold Python, and its temporary files are closed to others.
    """
    if os.geteuid() != 0:
        return (), str(folder)
    os.chown(folder, USER, USER)
    home = Path("~root").expanduser()
    shown = []
    for path in map(Path, (sys.base_prefix, sys.prefix, REPOSITORY)):
        for parent in reversed(path.parents):
            if parent.is_relative_to(home) and parent != home:
                shown += ["--perms", "0755", "--dir", str(parent)]
        shown += ["--ro-bind", str(path), str(path)]
    return (
        *(find_bwrap(), "--die-with-parent", "--dev-bind", "/", "/"),
        *("--perms", "0755", "--tmpfs", str(home), *shown, "--bind", str(folder), "/mnt"),
        *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
    ), "/mnt"


def test_a_users_file_can_undo_nothing_that_confines_it_while_it_is_imported(tmp_path):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id").write_text("hush")
    (tmp_path / "hostile.py").write_text(HOSTILE)
    before, place = as_ordinary_user(tmp_path)
    script = GRADE.format(user=USER, here=str(Path(__file__).parent))
    done = subprocess.run(
        [*before, sys.executable, "-c", script, place],
        env=os.environ | {"HOME": place, "PYTHONPATH": REPOSITORY},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "must grade in bubblewrap's confinement" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "1.0\n", done.stderr[-2000:]
