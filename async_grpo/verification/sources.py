"""The text of the users' reward files, read once by the dispatcher that brings them.

All verifiers of a pool run this text, those started later too: a file that is edited meanwhile
never mixes with what it was, and whoever brings another text is told apart by it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.util.user_code import hash_imported, text_of
from async_grpo.verification import graders
from async_grpo.verification.config import VerifierConfig

SHIPPED = "async_grpo.verification.graders.shipped"
# Of reward_registry.py as it is shipped: users edit theirs.
REGISTRY_SHA256 = "6bb7c0d5f2b242312a3bb17a6f93f911f20135ead13313b33fc38a6bf2784581"
EXECUTE_NO_TEXT = frozenset({"mathd", "sympy", "math_verify", "countdown", "majority"})
CODE_EXECUTION = "code_execution"


def verifier_config(worker: WorkerConfig) -> VerifierConfig:
    """What a dispatcher's verifiers run; its reward files are read now, and here."""
    names, registry, here = worker.reward_names, worker.reward_registry, (os.getcwd(),)
    return VerifierConfig(
        reward_names=names,
        registry=registry,
        num_verifiers=worker.global_num_verifiers,
        timeout_s=worker.verifier_timeout_s,
        memory_mib=worker.verifier_memory_mib,
        network=worker.verifier_network,
        environment=worker.verifier_variables,
        search_paths=here,
        sources=(sources := read_sources(names, registry=registry, search_paths=here)),
        imported={
            name: own
            for source in sources
            for name, own in hash_imported(str(_path_of(source, here)), what=source).items()
        },
        unconfined_rewards=worker.unconfined_rewards,
        unconfined_code=worker.unconfined_code,
    )


def source_of(name: str, registry: str) -> str:
    """The file or module that holds a reward.

    >>> source_of("own/mine.py:grade", "reward_registry"), source_of("mathd", "reward_registry")
    ('own/mine.py', 'reward_registry')
    """
    return name.rpartition(":")[0] or registry


def grader_of(name: str, config: VerifierConfig) -> str:
    """The shipped grader that a reward is, by the text that is run; empty: a user's function."""
    source = source_of(name, config.registry)
    text = config.sources.get(source)
    if text is None:
        return ""
    shipped = Path(graders.__file__).with_name("shipped.py")
    known = _sha256(text_of(str(shipped))) if source == SHIPPED else REGISTRY_SHA256
    return name.rpartition(":")[2] if _sha256(text) == known else ""


def _sha256(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def read_sources(
    reward_names: Sequence[str], *, registry: str, search_paths: Sequence[str]
) -> Mapping[str, str]:
    """Text by file or module, as the options name it.

    What is not found, or is no text, is left out: loading it says what is wrong.
    """
    texts = {}
    for source in dict.fromkeys(source_of(name, registry) for name in reward_names):
        if not (path := _path_of(source, search_paths)):
            continue
        try:
            texts[source] = text_of(str(path))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
    return texts


def _path_of(source: str, search_paths: Sequence[str]) -> Path | None:
    found = next((path for path in candidates(source, search_paths) if path.is_file()), None)
    if found or not source.isidentifier():
        return found
    spec = find_spec(source)  # of an editable installation, which lies on no path
    return Path(spec.origin) if spec and spec.origin else None


def candidates(source: str, search_paths: Sequence[str]) -> list[Path]:
    """Where a file, or the file of a module, is looked for; the first that exists is meant."""
    if source.endswith(".py"):
        return [Path(folder, source).resolve() for folder in (*search_paths, ".")]
    stem = Path(*source.split("."))
    files = (stem / "__init__.py", stem.with_name(f"{stem.name}.py"))
    return [Path(folder, file) for folder in (*search_paths, *sys.path) for file in files]
