#!/usr/bin/env bash
# Make .venv with the `cavvy` command in it. Called by `make setup`; does nothing when nothing changed.
#   scripts/setup.sh         what users need
#   scripts/setup.sh dev     and what tests and checks need
set -euo pipefail
cd "$(dirname "$0")/.."
group=${1:-user}
stamp=.venv/.setup-$group
sum=$(cat pyproject.toml constraints.txt scripts/setup.sh src/cavvy/__init__.py | sha256sum | cut -d' ' -f1)
for made in "$stamp" .venv/.setup-dev; do  # what tests need holds what users need
    if [ -f "$made" ] && [ "$(cat "$made")" = "$sum" ] && [ -x .venv/bin/cavvy ]; then exit 0; fi
done

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
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv .venv
    .venv/bin/python -m pip uninstall -qq --disable-pip-version-check --yes setuptools  # 4 MB that nothing needs
fi
what="cavvy and what it needs"
[ "$group" = dev ] && what="$what, with what tests and checks need"
echo "setup: installing $what"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
if [ "$group" = dev ]; then
    .venv/bin/python - <<'P' >.venv/dev-requirements.txt
import pathlib, tomllib
print("\n".join(tomllib.loads(pathlib.Path("pyproject.toml").read_text())["dependency-groups"]["dev"]))
P
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement .venv/dev-requirements.txt
fi
.venv/bin/python -m compileall -q src  # so that the first start is as quick as the second; pip did the same for the rest
echo "$sum" >"$stamp"
echo "setup: done; try: .venv/bin/cavvy --help"
