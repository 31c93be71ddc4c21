#!/usr/bin/env bash
# Write the lock files again from pyproject.toml; called by `make lock`.
#   requirements/base.lock   what users need, with hashes
#   requirements/server.lock and what a server of a team needs (PostgreSQL, metrics, traces, signed models), with hashes
#   requirements/dev.lock    and what tests, checks and the docs site need, with hashes
#   constraints.txt          the same versions without hashes, for extras and for PyTorch
# UPGRADE=1 takes the newest versions that pyproject.toml allows.
set -euo pipefail
cd "$(dirname "$0")/.."
tool=.cache/lock
[ -x $tool/bin/uv ] || { .venv/bin/python -m venv $tool && $tool/bin/pip install --quiet --disable-pip-version-check 'uv>=0.5'; }
compile() {  # compile FILE [OPTION ...]
    local file=$1
    shift
    $tool/bin/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 \
        --no-emit-index-url --no-emit-find-links --no-annotate --no-header ${UPGRADE:+--upgrade} "$@" --output-file "$file"
    echo "lock: wrote $file ($(grep -c == "$file") packages)"
}
compile requirements/base.lock --generate-hashes
compile requirements/dev.lock --generate-hashes --group dev
# PyTorch is left out above: its builds differ by platform, and so do their hashes.
compile constraints.txt --group dev
echo "torch==2.13.0" >>constraints.txt
# the versions that tests use, also where an extra would permit newer ones
rm requirements/server.lock
compile requirements/server.lock --generate-hashes --extra postgres --extra metrics --extra edge --extra otel --constraint constraints.txt
