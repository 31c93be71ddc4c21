#!/usr/bin/env bash
# Run the tests; called by make's test targets. Without arguments, all tests run, in several processes.
#   --fast             only tests that need no server
#   --provider NAME    only tests of one provider
# Other arguments go to pytest. Variables:
#   CAVVY_TEST_PROCESSES=6     more than there are cores here, a GB of memory each: tests of real servers wait for most of their time
#   CAVVY_TEST_LIMIT_S=10800   a run that takes longer hangs; it is ended as a failure
#   CAVVY_TEST_RERUNS_FILE     where to list the tests that were tried again; .cache/reruns.json
#   CAVVY_TEST_SECONDS=FILE    write there how long each group took; tests/seconds.json is what they are ordered by
set -euo pipefail
cd "$(dirname "$0")/.."
pytest=(.venv/bin/python -m pytest)
cores=$(nproc)
case "${1:-}" in
    "") ;;
    --fast) exec "${pytest[@]}" -n "${CAVVY_TEST_PROCESSES:-$cores}" tests/unit tests/contract tests/sim "$@" ;;
    --provider)
        [ -n "${2:-}" ] || { echo "say which provider, for example: make test-provider P=kubernetes" >&2; exit 2; }
        exec "${pytest[@]}" "$@" ;;
    *) exec "${pytest[@]}" "$@" ;;
esac
export CAVVY_TEST_RERUNS=2 CAVVY_TEST_RERUNS_FILE=${CAVVY_TEST_RERUNS_FILE:-$PWD/.cache/reruns.json}
work=$(mktemp -d /tmp/rt.XXXX)  # short: the paths of Unix sockets end at 107 characters
.venv/bin/python -m tests.system.ready >"$work/ready" 2>&1 &  # what the first tests do not need yet
ready=$!
trap 'kill "$ready" 2>/dev/null || true; cat "$work/ready"; rm -rf "$work"' EXIT
timeout --foreground --signal=INT --kill-after=60 "${CAVVY_TEST_LIMIT_S:-10800}" \
    "${pytest[@]}" -n "${CAVVY_TEST_PROCESSES:-$((cores * 3))}" --basetemp "$work/t"
