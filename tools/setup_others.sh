#!/usr/bin/env bash
# Makes or updates .venv-others/NAME from requirements/others-NAME.txt: tools/setup_others.sh NAME...
# A no-op when it is current.
#
# Packages that need other versions than ours have a Python of their own there. A set whose first
# line says so sees the packages of .venv behind its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_NO_INPUT=1 PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

exec 9<requirements/base.txt
flock 9 2>/dev/null || true # two makes at once: the second waits, then finds nothing to do
for name in "$@"; do
    file="requirements/others-$name.txt" venv="$PWD/.venv-others/$name"
    want="$venv $(sha256sum <"$file")"
    [ "$(cat "$venv/setup.stamp" 2>/dev/null)" = "$want" ] && continue
    echo "installing $file"
    rm -rf "$venv"
    .venv/bin/python -m venv "$venv"
    if ! "$venv/bin/python" -m pip install --progress-bar off -r "$file" >"$venv/setup.log" 2>&1; then
        echo "set-up failed: $(grep '^ERROR' "$venv/setup.log" | tail -n 1): see $venv/setup.log" >&2
        exit 1
    fi
    if grep -q '^# beside .venv' "$file"; then
        # Its own come first; `site` reads the .pth files of ours (the package itself is one).
        for own in "$venv"/lib/python*/site-packages; do
            echo "import site; site.addsitedir('$(echo "$PWD"/.venv/lib/python*/site-packages)')" \
                >"$own/ours.pth"
        done
    fi
    echo "$want" >"$venv/setup.stamp"
done
