#!/usr/bin/env bash
# Make .venv with the `cavvy` command in it. Called by `make setup`; does nothing when nothing changed.
#   scripts/setup.sh         what users need
#   scripts/setup.sh dev     and what tests and checks need
# EXTRAS=aws,sim adds what these optional parts of pyproject.toml need.
set -euo pipefail
cd "$(dirname "$0")/.."
group=${1:-user}
IFS=', ' read -ra extras <<<"${EXTRAS:-}"
for extra in "${extras[@]}"; do
    if ! sed -n '/^\[project.optional-dependencies\]/,/^$/p' pyproject.toml | grep -q "^$extra = "; then
        echo "setup: there is no extra '$extra' in pyproject.toml" >&2
        exit 1
    fi
done
sum=$(cat pyproject.toml constraints.txt requirements/*.lock scripts/setup.sh src/cavvy/__init__.py | sha256sum | cut -d' ' -f1)
is_made() { [ -x .venv/bin/cavvy ] && [ "$(cat ".venv/.setup-$1" 2>/dev/null)" = "$sum" ]; }
missing=0
is_made "$group" || is_made dev || missing=1  # what tests need holds what users need
for extra in "${extras[@]}"; do is_made "extra-$extra" || missing=1; done
if [ $missing = 0 ]; then exit 0; fi

# On a terminal one line, which shows what is being done; elsewhere a line at the begin.
tell() { printf '\r%s\e[K' "$1"; }
clear_line() { if [ -t 1 ]; then printf '\r\e[K'; fi; }
ticker=
trap '[ -z "$ticker" ] || kill "$ticker" 2>/dev/null || true' EXIT
# Show a line that moves, until stop_ticking.
start_ticking() {
    [ -t 1 ] || { echo "$1"; return 0; }
    tell "$1"
    while sleep 0.5; do
        size=$(du -sm .venv 2>/dev/null | cut -f1 || true)
        tell "$1 (${size:-0} MB, $SECONDS s)"
    done &
    ticker=$!
}
stop_ticking() {
    [ -n "$ticker" ] || return 0
    kill "$ticker"
    wait "$ticker" 2>/dev/null || true
    ticker=
    clear_line
}

python=${PYTHON:-}
for candidate in python3 python3.13 python3.12 python3.11; do
    [ -n "$python" ] && break
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        python=$candidate
    fi
done
if [ -z "$python" ]; then
    echo "setup: Python 3.11 or newer is needed; none was found. Install it, or say which: make setup PYTHON=/path/to/python3" >&2
    exit 1
fi
if [ ! -x .venv/bin/python ]; then
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            echo "setup: $python has no venv module; installing Debian's python3-venv"
            export DEBIAN_FRONTEND=noninteractive
            apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
        else
            echo "setup: $python has no venv module; run 'sudo apt-get install python3-venv' and try again" >&2
            exit 1
        fi
    fi
    start_ticking "setup: making .venv with $("$python" --version)"
    "$python" -m venv .venv
    .venv/bin/python -m pip uninstall -qq --disable-pip-version-check --yes setuptools  # 4 MB that nothing needs
    stop_ticking
fi
what="cavvy and what it needs"
[ "$group" = dev ] && what="$what, with what tests and checks need"
[ ${#extras[@]} -gt 0 ] && what="$what, with ${extras[*]}"
start_ticking "setup: installing $what"
# What pip prints goes into a file; it is shown if pip fails.
pip() {
    local code=0
    .venv/bin/python -m pip "$1" --quiet --disable-pip-version-check "${@:2}" >.venv/.setup-log 2>&1 || code=$?
    [ $code = 0 ] || { clear_line; cat .venv/.setup-log >&2; }
    return $code
}
lock=base
[ "$group" = dev ] && lock=dev
# The lock file is complete. Without --no-deps, pip 23 takes the newest release for a dependency with extras,
# such as coverage[toml], and then refuses it, because the lock file has another one.
pip install --no-deps --require-hashes --requirement "requirements/$lock.lock"
wanted=$(IFS=,; echo "${extras[*]}")
pip install --constraint constraints.txt --editable ".${wanted:+[$wanted]}"
# PyTorch is not in the lock file: its builds differ by platform, and so do their hashes.
if [ "$group" = dev ]; then
    # Without a GPU, PyTorch for CPUs saves 5 GB of CUDA libraries.
    ls /dev/nvidiactl /dev/kfd /dev/dxg 2>/dev/null | grep -q . ||
        pip install --constraint constraints.txt --no-deps --retries 0 torch \
            --index-url https://download.pytorch.org/whl/cpu 2>/dev/null || true
    pip install --constraint constraints.txt torch
fi
.venv/bin/python -m compileall -q src  # so that the first start is as quick as the second; pip did the same for the rest
# pytest rewrites the asserts of its plugins, 270 files, in each process that may not cache the result.
if [ "$group" = dev ]; then env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest --version --version >/dev/null; fi
for made in "$group" "${extras[@]/#/extra-}"; do echo "$sum" >".venv/.setup-$made"; done
stop_ticking
echo "setup: done in $SECONDS s; try: .venv/bin/cavvy --help"
