#!/usr/bin/env bash
# What Cavvy is for: plan a large run on spot; run a small one here, lose its machine, resume, read the bill.
# Called by `make demo`. It keeps everything in .cache/demo and stops what it started.
#   DEMO_SHORT=1    a quarter of the epochs
#   DEMO_EPOCHS=15  that many
set -euo pipefail
cd "$(dirname "$0")/.."
export CAVVY_HOME=$PWD/.cache/demo/home CAVVY_CONFIG=$PWD/.cache/demo/settings.toml
export PATH=$PWD/.venv/bin:$PATH
mkdir -p "$CAVVY_HOME" && chmod 700 "$CAVVY_HOME"
cat >"$CAVVY_CONFIG" <<'T'
# This machine costs 3.60 dollars an hour, so that the demo's bill is not zero.
[providers.local]
price_usd_hr = 3.60
T
task=examples/digits/task.yaml
epochs=${DEMO_EPOCHS:-${DEMO_SHORT:+25}}
short=(${epochs:+--param "epochs=$epochs"})
epochs=${epochs:-100}

if [ -t 1 ]; then bold=$'\e[1m' blue=$'\e[1;34m' plain=$'\e[0m'; else bold='' blue='' plain=''; fi
heading() { printf '\n%s%s%s\n' "$blue" "$*" "$plain"; }
show() {
    printf '%s$ %s%s\n' "$bold" "$*" "$plain"
    "$@"
}
watcher=
leave() {
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || true
    cavvy down --all --yes >/dev/null 2>&1 || true
    cavvy server stop >/dev/null 2>&1 || true
}
trap leave EXIT

echo "First a plan for eight H100, which starts nothing. Then a small network learns to read handwritten digits on this"
echo "machine; it loses the machine halfway and continues from its checkpoint. The task's setup installs torch once, and names each package that it downloads."
echo "The demo uses no GPUs, cloud accounts or containers, and the machine's price of \$3.60/h is made up."

heading "1. What does a run on eight H100 cost by its deadline, on spot, on demand, and when Cavvy chooses?"
show cavvy plan examples/spot/task.yaml --limit 3

heading "2. Run a small one here. After a third of the epochs, a fire drill in the background takes the machine away:"
printf '%s$ cavvy drill preempt NAME --notice 5s%s\n' "$bold" "$plain"
last=$(cavvy ps --all -o json | .venv/bin/python -c 'import json, sys; print(max([j["id"] for j in json.load(sys.stdin)], default=""))')
.venv/bin/python scripts/demo_preempt.py "$last" $((epochs / 3)) &
watcher=$!
show cavvy run $task --yes "${short[@]}"
wait "$watcher"
watcher=

name=$(cavvy ps --limit 1 -o json | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)[0]["name"])')
heading "3. What happened, step by step"
show cavvy events "$name"

heading "4. The bill, line by line"
show cavvy cost "$name"
