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
# `make demo-edge` has installed what the jobs need here, so they install nothing
sed -i -e '/^setup:/,/^$/d' -e "s#^run: python3 #run: >-\\n  '$PWD/.venv/bin/python' #" "$state"/task/*.yaml
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

heading "1. Ten devices enrol with one token; each makes its own key"
join_link
token=$(cavvy edge token --site lyon --count 10 2>/dev/null)
printf '%s$ cavvy edge token --site lyon --count 10%s\n%s\n' "$bold" "$plain" "$token"
edge start 10 "$token"

heading "2. One graph of jobs: train on 60 images, publish, test, deploy to one device, 30 %, all; then collect and train again"
show cavvy run "$state/task/loop.yaml" --detach --yes --param soak=1s
edge await 1 10
show cavvy edge list

heading "3. The link to the server breaks. All devices go on serving:"
cut_link
edge load 300
join_link

heading "4. A bad version, which refuses every request, goes to one device first. The device answers with the old one"
show cavvy run "$state/task/task.yaml" --param bad=true --name edge-bad --yes
show cavvy model publish edge-bad --name digits
edge load 300 --until-halted & load=$!
show cavvy edge deploy digits@2 --soak 1s --waves 0%,30%,100%
wait "$load"
show cavvy edge rollouts

heading "5. Devices keep the images of which they are not sure. When 100 have come, the graph goes on: train, publish, test, deploy"
show cavvy status collect
edge load 300 --new
edge await 3 10
show cavvy wait deploy-better
show cavvy ps
edge load 300 --unseen
show cavvy edge list
