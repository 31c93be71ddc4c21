#!/usr/bin/env bash
# The main job, as a user would run it: plan it everywhere, run it here, lose the node, resume, read the bill.
# Called by `make demo`. It keeps everything in .cache/demo and stops what it started.
#   DEMO_SHORT=1   a quarter of the epochs
set -euo pipefail
cd "$(dirname "$0")/.."
export REMUDA_HOME=$PWD/.cache/demo/home REMUDA_CONFIG=$PWD/.cache/demo/settings.toml
export PATH=$PWD/.venv/bin:$PATH
mkdir -p "$REMUDA_HOME" && chmod 700 "$REMUDA_HOME"
cat >"$REMUDA_CONFIG" <<'T'
# This machine costs 3.60 dollars an hour, so that the demo's bill is not zero.
[providers.local]
price_usd_hr = 3.60
T
epochs=100
[ -n "${DEMO_SHORT:-}" ] && epochs=25
task=examples/digits/task.yaml

say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }
stop_server() { remuda down --all --yes >/dev/null 2>&1 || true; remuda server stop >/dev/null 2>&1 || true; }
trap stop_server EXIT

echo "Not part of this demo: GPUs, cloud accounts and containers. What it needs: this machine, and torch (installed by the task's own setup, once)."

say "remuda plan $task --limit 5"
remuda plan $task --limit 5 --param epochs=$epochs

say "remuda run $task --yes --param epochs=$epochs"
remuda run $task --yes --param epochs=$epochs --detach -o json >.cache/demo/job.json
name=$(.venv/bin/python -c 'import json; print(json.load(open(".cache/demo/job.json"))["name"])')
# In the background: once a third of the epochs is done, the machine is taken away.
.venv/bin/python scripts/demo_preempt.py "$name" $((epochs / 3)) &
watcher=$!
remuda logs -f "$name"
wait $watcher

say "remuda events $name"
remuda events "$name"
