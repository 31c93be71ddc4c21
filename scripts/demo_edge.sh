#!/usr/bin/env bash
# Train here, serve at the edge: ten devices, a broken link, a bad version that goes back, hard samples, a better model.
# Called by `make demo-edge`. It keeps everything in .cache/demo-edge (or DEMO_FOLDER) and stops what it started.
# The devices are processes of this machine behind one link that is cut; it needs no GPU and no root.
set -euo pipefail
cd "$(dirname "$0")/.."
state=${DEMO_FOLDER:-$PWD/.cache/demo-edge}
rm -rf "$state"
export CAVVY_HOME=$state/home CAVVY_CONFIG=$state/settings.toml
export PATH=$PWD/.venv/bin:$PATH
mkdir -p "$CAVVY_HOME" "$state/devices" && chmod 700 "$CAVVY_HOME"
cp -r examples/edge-digits "$state/task"
# `make demo-edge` has installed what the job needs here, so it installs nothing
sed -i -e '/^setup:/,/^$/d' -e "s#^run: python3 #run: >-\\n  '$PWD/.venv/bin/python' #" "$state/task/task.yaml"
edge() { .venv/bin/python scripts/demo_edge.py "$state" "$@"; }
read -r inner outer < <(edge ports)
cat >"$CAVVY_CONFIG" <<T
[server]
tls_listen = "127.0.0.1:$inner"
advertise = "https://127.0.0.1:$outer"
T

if [ -t 1 ]; then bold=$'\e[1m' blue=$'\e[1;34m' plain=$'\e[0m'; else bold='' blue='' plain=''; fi
heading() { printf '\n%s%s%s\n' "$blue" "$*" "$plain"; }
show() {
    printf '%s$ %s%s\n' "$bold" "$*" "$plain"
    "$@"
}
link=
join_link() { .venv/bin/python scripts/demo_edge.py "$state" link "$outer" "$inner" & link=$!; }
cut_link() { kill "$link" 2>/dev/null || true; wait "$link" 2>/dev/null || true; link=; }
leave() {
    [ -z "$link" ] || cut_link
    edge stop >/dev/null 2>&1 || true
    cavvy down --all --yes >/dev/null 2>&1 || true
    cavvy server stop >/dev/null 2>&1 || true
}
trap leave EXIT
deploy() { show cavvy edge deploy "$1" --soak 1s --waves 0%,30%,100% --collect-below 0.6; }

heading "1. Train a small classifier of handwritten digits by a job, on 60 images, and publish it"
show cavvy run "$state/task/task.yaml" --yes
show cavvy model publish edge-digits --name digits --note images=60

heading "2. Ten devices enrol with one token; each makes its own key"
join_link
token=$(cavvy edge token --site lyon --count 10 2>/dev/null)
printf '%s$ cavvy edge token --site lyon --count 10%s\n%s\n' "$bold" "$plain" "$token"
edge start 10 "$token"

heading "3. Roll the model out: one device, 30 %, all"
deploy digits@1
edge await 1 10
show cavvy edge list

heading "4. The link to the server breaks. All devices go on serving:"
cut_link
edge load 300
join_link

heading "5. A bad version, which refuses every request, goes to one device first. The device answers with the old one"
show cavvy run "$state/task/task.yaml" --param bad=true --name edge-bad --yes
show cavvy model publish edge-bad --name digits
deploy digits@2
edge load 300 --until-halted
show cavvy edge rollouts

heading "6. The devices kept the images of which they were not sure. Label them, and train again with them"
edge await-samples
show cavvy edge collect digits --out "$state/task/samples.jsonl"
edge label "$state/task/samples.jsonl" "$state/task/hard.jsonl"
show cavvy run "$state/task/task.yaml" --name edge-better --yes
show cavvy model publish edge-better --name digits
deploy digits@3
edge await 3 10
edge load 300 --unseen
show cavvy edge list
