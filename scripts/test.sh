#!/usr/bin/env bash
# Run the tests; called by `make test`. Arguments go to pytest; without any, all tests run, in several processes.
#   CAVVY_TEST_PROCESSES=4     more than there are cores here: tests of real servers wait for most of their time
#   CAVVY_TEST_BUDGET_S=2700   tests of real servers that have not begun by then are skipped, each saying so
#   CAVVY_TEST_SECONDS=FILE    write there how long each group took; tests/seconds.json is what they are ordered by
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || exec .venv/bin/python -m pytest "$@"
export CAVVY_TEST_BUDGET_S=${CAVVY_TEST_BUDGET_S:-2700} CAVVY_TEST_BEGAN
CAVVY_TEST_BEGAN=$(date +%s)
work=$(mktemp -d /tmp/rt.XXXX)  # short: the paths of Unix sockets end at 107 characters
.venv/bin/python -m tests.system.ready >"$work/ready" 2>&1 &  # what the first tests do not need yet
ready=$!
trap 'kill "$ready" 2>/dev/null || true; cat "$work/ready"; rm -rf "$work"' EXIT
# The limit is for a run that hangs; it ends the run as a failure.
timeout --foreground --signal=INT --kill-after=60 "$((CAVVY_TEST_BUDGET_S + 900))" \
    .venv/bin/python -m pytest -n "${CAVVY_TEST_PROCESSES:-4}" --basetemp "$work/t"
