#!/usr/bin/env bash
# Run the tests; called by make's test targets: all that need no real server, unless one of these
# arguments comes first, or paths of tests, which run alone.
#   --servers          the others: real servers, agents and jobs as processes of their own
#   --changed          those of the first that this working tree's changes can break
#   --room NAME        all tests of one room, of every level: tests/NAME
# Other arguments go to pytest. Variables:
#   CAVVY_TEST_PROCESSES=6     how many tests run at once, a GB of memory each: tests of real servers wait for most of their time
#   CAVVY_TEST_LIMIT_S=10800   a run that takes longer hangs; it is ended as a failure
#   CAVVY_TEST_RERUNS_FILE     where to list the tests that were tried again; .cache/reruns.json
#   CAVVY_TEST_SECONDS=FILE    write there how long each group took; tests/seconds.json is what they are ordered by
set -euo pipefail
cd "$(dirname "$0")/.."
pytest=(.venv/bin/python -m pytest)
cores=$(nproc)
case "${1:-}" in
    --changed)
        mapfile -t what < <(.venv/bin/python scripts/changed_tests.py)
        [ ${#what[@]} -gt 0 ] || { echo "no test imports what has changed"; exit 0; }
        what+=(-m "not system"); processes=$((cores + 1)); shift ;;
    --servers) what=(-m system); processes=$((cores * 3)); shift ;;
    --room)
        [ -d "tests/${2:-none}" ] || { echo "say which room, a folder of tests/: make test ROOM=serving" >&2; exit 2; }
        what=("tests/$2"); processes=$((cores * 2)); shift 2 ;;
    "" | -*) what=(-m "not system"); processes=$((cores + 1)) ;;
    *) exec "${pytest[@]}" "$@" ;;
esac
export CAVVY_TEST_RERUNS=2 CAVVY_TEST_RERUNS_FILE=${CAVVY_TEST_RERUNS_FILE:-$PWD/.cache/reruns.json}
work=$(mktemp -d /tmp/rt.XXXX)  # short: the paths of Unix sockets end at 107 characters
ready=
if [ "${what[*]}" = "-m system" ]; then  # what the first tests do not need yet
    .venv/bin/python -m tests.system.ready >"$work/ready" 2>&1 &
    ready=$!
fi
trap 'if [ -n "$ready" ]; then kill "$ready" 2>/dev/null || true; cat "$work/ready"; fi; rm -rf "$work"' EXIT
timeout --foreground --signal=INT --kill-after=60 "${CAVVY_TEST_LIMIT_S:-10800}" \
    "${pytest[@]}" -n "${CAVVY_TEST_PROCESSES:-$processes}" --basetemp "$work/t" "${what[@]}" "$@"
