"""What no file of the package may do, read from its syntax: each exception says why it is one."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "async_grpo"
FILES = sorted(PACKAGE.rglob("*.py"))
UNPICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}
MAY_EXECUTE = {
    "api/rewards.py": "the user's rewards, pickled here, loaded as every reward file is",
    "util/user_code.py": "the user's rewards, algorithm, environment, as read, where they run",
    "data/table.py": "a question's other columns, which rank 0 packed, in the run's own processes",
    "batching/sample_log.py": "packs a group's lines for the recorder; nothing is unpacked here",
    "types/message.py": "messages between the run's own processes, which Ray pickles anyway",
    "run/companions.py": "what the controller packed: Ray, which carries it, pickles every call",
    "verification/jail.py": "the program under test, in the process that was confined for it",
    "verification/jail_calls.py": "the same, function by function",
}


def calls(tree):
    """(dotted name, call) of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(call, name):
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == name), None)


def dangers(tree):
    """Ways in which foreign bytes or text become code."""
    for node in ast.walk(tree):
        names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
        imported = [getattr(node, "module", None) or "", *names]
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from UNPICKLERS & {name.partition(".")[0] for name in imported}
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            yield "trust_remote_code"
    for name, call in calls(tree):
        if name in ("eval", "exec"):
            yield name
        if name == "torch.load" and keyword(call, "weights_only") != "True":
            yield name
        if name in ("np.load", "numpy.load") and keyword(call, "allow_pickle") != "False":
            yield name
        if name.startswith("subprocess.") and keyword(call, "shell") not in (None, "False"):
            yield "shell"


def naked_waits(tree):
    """Waits for another process or thread that have no deadline."""
    for name, call in calls(tree):
        has_deadline = keyword(call, "timeout") or keyword(call, "deadline")
        if name in ("ray.get", "ray.wait", "subprocess.run") and not has_deadline:
            yield name
        if name.endswith((".join", ".communicate")) and not call.args and not has_deadline:
            yield name


def offenders(find, allowed):
    """What `find` sees in each file that is not allowed it."""
    seen = {
        str(file.relative_to(PACKAGE)): list(find(ast.parse(file.read_text()))) for file in FILES
    }
    assert all(seen[name] for name in allowed), "an exception that is needed no more"
    return {name: found for name, found in seen.items() if found and name not in allowed}


def test_nothing_foreign_is_unpickled_or_executed():
    assert offenders(dangers, MAY_EXECUTE) == {}


def test_every_wait_for_another_process_has_a_deadline():
    assert offenders(naked_waits, {}) == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from yaml import load", "import numpy, dill", "eval(text)", "exec(text)",
        "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)", "subprocess.run(c, shell=True)",
    ],
)  # fmt: skip
def test_each_danger_would_be_seen(source):
    assert list(dangers(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    ["ray.get(x)", "ray.wait([x])", "thread.join()", "child.communicate(b'')", "subprocess.run(c)"],
)
def test_each_naked_wait_would_be_seen(source):
    if "communicate" in source:
        source = source.replace("b''", "")
    assert list(naked_waits(ast.parse(source)))
