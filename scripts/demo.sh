#!/usr/bin/env bash
# What Cavvy is for: plan a large run on spot; run a small one here, lose its machine, resume, read the bill.
# Called by `make demo` and `make demo-train`. It keeps everything in .cache/demo and stops what it started.
# Each step checks what it shows: the demo fails where that did not happen.
#   DEMO_TASK=examples/digits/task.yaml  train this; the default needs only NumPy
#   DEMO_EPOCHS=15                       train so many epochs
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${DEMO_FOLDER:-$PWD/.cache/demo}
export CAVVY_HOME=$folder/home CAVVY_CONFIG=$folder/settings.toml
export PATH=$PWD/.venv/bin:$PATH
mkdir -p "$CAVVY_HOME" && chmod 700 "$CAVVY_HOME"
cat >"$CAVVY_CONFIG" <<'T2'
# This machine costs 3.60 dollars an hour, so that the demo's bill is not zero.
[providers.local]
price_usd_hr = 3.60
T2
task=${DEMO_TASK:-examples/digits-numpy/task.yaml}
epochs=${DEMO_EPOCHS:-$(sed -n 's/^ *epochs: .*default: \([0-9]*\).*/\1/p' "$task")}

if [ -t 1 ]; then bold=$'\e[1m' blue=$'\e[1;34m' plain=$'\e[0m'; else bold='' blue='' plain=''; fi
[ -z "${NO_COLOR:-}" ] || blue=''
frames='-\\|/'
heading() { printf '\n%s%s%s\n' "$blue" "$*" "$plain"; }
show() {
    printf '%s$ %s%s\n' "$bold" "$*" "$plain"
    "$@"
}
# Wait for a process. On a terminal, something moves until it has ended, also where it prints nothing.
await() {
    local code=0 turns=0
    while [ -t 1 ] && kill -0 "$1" 2>/dev/null; do
        printf '\r%s %s' "${frames:turns++%4:1}" "$2"
        sleep 0.3
    done
    [ ! -t 1 ] || printf '\r\e[K'
    wait "$1" || code=$?
    return "$code"
}
# Move one character at the cursor for six seconds: a command on a busy machine begins late to say something.
tick() {
    local turn
    [ -t 1 ] || return 0
    for turn in {0..19}; do
        printf '\r%s\r' "${frames:turn%4:1}"
        sleep 0.3
    done
}
# Run a command whose output is kept for later.
keep() {
    local code=0
    "${@:2}" >"$folder/output" 2>"$folder/errors" &
    await $! "$1" || code=$?
    cat "$folder/errors" >&2
    return "$code"
}
# Show a command without the lines of its output that a first look does not need; the screen says so.
brief() {
    printf '%s$ %s%s  # shortened\n' "$bold" "${*:2}" "$plain"
    keep "${*:2:2}" "${@:2}"
    sed -e "$1" -e '/^$/d' "$folder/output"
}
look() { keep checking .venv/bin/python scripts/demo_checks.py "$@"; }
check() {
    look "$@"
    cat "$folder/output"
}
watcher=
leave() {
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || true
    { cavvy nodes down --all --yes; cavvy server stop; } >/dev/null 2>&1 &
    await $! "stopping what the demo has started" || true
}
trap leave EXIT
trap 'exit 130' INT TERM HUP

echo "Plans eight H100 without starting them; then trains here, loses the machine and"
echo "continues. No GPU, account or container; this machine's \$3.60/h is made up."

heading "1. What does a run on eight H100 cost, on spot, on demand or by Cavvy's choice?"
narrow="s/  NOTES\$//; s/  \[[0-9]*\]\$//; s/  READINESS   //; s/  configurable//; s/  CPUS  BUY/  BUY/; s/  [0-9][0-9]*  \(spot\|on-demand\) /  \1 /; s/  INSTANCE *ACC/  ACC/; s/  [^ ]*[_-][^ ]* *\([0-9]* x \)/  \1/"
brief "$narrow; /^pretrain:/d; /^prices:/d; /^based on/d; /^\[1\]/d; / shown (/d; / do not fit/,\$d" cavvy plan examples/spot/task.yaml --limit 2
cavvy server start >/dev/null 2>&1 &
starting=$!
check plan examples/spot/task.yaml

heading "2. Run a small one here; after a third, 'cavvy nodes drill' takes the machine"
await "$starting" "starting a server"
look newest
last=$(cat "$folder/output")
.venv/bin/python scripts/demo_checks.py preempt "$last" $((epochs / 3)) &
watcher=$!
tick &
show cavvy run "$task" --yes --param "epochs=$epochs"
await "$watcher" checking
watcher=
look name "$last"
name=$(cat "$folder/output")
check resumed "$name"

heading "3. What happened, step by step"
brief "/[-0-9]  \(checkpoint\|claimed\|setup\|drill\|exited\|billed\|running\|queued\) /d; / submitted$/d" cavvy events "$name"
check events "$name"

heading "4. The bill, line by line"
brief "/^tags/d; /^time/d; /THE SAME RUN/,\$d" cavvy cost "$name"
check bill "$name"
