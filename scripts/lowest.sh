#!/usr/bin/env bash
# Install the lowest versions that pyproject.toml permits, test the commands with these versions, and
# run one job; called by `make test-lowest`. Other packages in a user's environment often need
# versions that are older than those of the lock files.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.cache/lowest
mkdir -p $folder
.venv/bin/python - >$folder/wanted.txt <<'PYTHON'
import re, tomllib
from pathlib import Path

for line in tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]:
    print(re.sub(r">=([0-9.]+)(,<[0-9.]+)?", r"==\1", line))
PYTHON
if ! cmp --silent $folder/wanted.txt $folder/installed.txt; then
    rm -rf $folder/venv
    .venv/bin/python -m venv $folder/venv
    pip() { $folder/venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
    pip --requirement $folder/wanted.txt pytest pytest-xdist pytest-timeout pytest-rerunfailures hypothesis httpx
    pip --no-deps --editable .
    cp $folder/wanted.txt $folder/installed.txt
fi
echo "lowest: testing the commands with $(grep -E '^(click|msgspec|pydantic|fastapi|jinja2)==' $folder/wanted.txt | tr '\n' ' ')"
# The deselected test reads what click's test runner of version 8.4 writes.
$folder/venv/bin/python -m pytest -q -n2 tests/cli/unit/test_cli*.py tests/client/unit/test_contexts.py tests/console/unit/test_console_*.py \
    --deselect tests/cli/unit/test_cli_jobs.py::test_a_job_that_is_asked_about_says_nothing_but_itself_on_standard_output "$@"
echo "lowest: running a job"
home=$(mktemp -d)
export CAVVY_HOME=$home/home
trap '$folder/venv/bin/cavvy server stop >/dev/null 2>&1 || true; rm -rf "$home"' EXIT
printf 'run: echo "it works"\n' >"$home/task.yaml"
$folder/venv/bin/cavvy run --yes "$home/task.yaml" | tee "$home/log"
grep --quiet "it works" "$home/log"
