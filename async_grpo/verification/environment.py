"""What verifier processes may know of this one: an allow-list, so that no secret is forgotten."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ALLOWED = frozenset(
    [
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONHOME",
        "PYTHONPYCACHEPREFIX",
        "SHELL",
        "TEMP",
        "TMP",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "XDG_CACHE_HOME",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "ASYNC_GRPO_VERIFIER_NAMESPACES",
        "ASYNC_GRPO_ALLOW_UNCONFINED_CODE",
    ]
)
PASSED_ON = "ASYNC_GRPO_VERIFIER_ENV"  # names more of them, with commas
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CREDENTIALS = [
    ".ray/auth_token",
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".config/gcloud",
    ".kube",
    ".docker",
    ".netrc",
    ".git-credentials",
    ".config/gh",
    ".pypirc",
    ".npmrc",
    ".cache/huggingface/token",
    ".cache/huggingface/stored_tokens",
    ".config/wandb",
    ".config/openai",
]
CREDENTIAL_VARIABLES = ("RAY_AUTH_TOKEN_PATH", "GOOGLE_APPLICATION_CREDENTIALS", "HF_TOKEN_PATH")


def verifier_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The variables that verifier processes start with; also what their /proc/self/environ holds.

    >>> environment = {"HOME": "/home/me", "RAY_AUTH_TOKEN": "x", "LC_ALL": "C", "JUDGE": "y"}
    >>> sorted(set(verifier_environment(environment)) & set(environment))
    ['HOME', 'LC_ALL']
    >>> "JUDGE" in verifier_environment(environment | {"ASYNC_GRPO_VERIFIER_ENV": "JUDGE, OTHER"})
    True
    """
    more = {name.strip() for name in ours.get(PASSED_ON, "").split(",")}
    kept = {
        name: value
        for name, value in ours.items()
        if name in ALLOWED or name in more or name.startswith("LC_")
    }
    paths = [path or os.getcwd() for path in sys.path]
    return ONE_THREAD | kept | {"PYTHONPATH": os.pathsep.join(paths)}


def credential_paths(ours: Mapping[str, str]) -> list[str]:
    """Files and folders of this user that open doors elsewhere, whether they exist or not."""
    home = Path(ours.get("HOME") or Path.home())
    named = [ours[name] for name in CREDENTIAL_VARIABLES if ours.get(name)]
    if "HF_HOME" in ours:
        named += [f"{ours['HF_HOME']}/token", f"{ours['HF_HOME']}/stored_tokens"]
    return sorted({str(home / path) for path in CREDENTIALS} | set(named))
