#!/usr/bin/env bash
# Train here, serve at the edge: ten devices, a broken link, a bad version that goes back, hard samples, a better model.
# Called by `make demo-edge`. It keeps everything in .cache/demo-edge (or DEMO_FOLDER) and stops what it started.
# As root, each device has a network namespace, joined to a bridge by a link that is cut; otherwise the devices are
# processes of this machine behind one link. It needs no GPU, and changes neither the firewall nor the forwarding.
set -euo pipefail
cd "$(dirname "$0")/.."
state=${DEMO_FOLDER:-$PWD/.cache/demo-edge}
mkdir -p "$(dirname "$state")"
exec 9>"$state.lock"
if command -v flock >/dev/null && ! flock -n 9; then
    echo "another demo uses $state: wait until it ends, or set DEMO_FOLDER" >&2
    exit 1
fi
edge() { .venv/bin/python scripts/demo_edge.py "$state" "$@"; }
[ ! -f "$state/spaces" ] || edge remove  # of a demo that was killed
rm -rf "$state"
export CAVVY_HOME=$state/home CAVVY_CONFIG=$state/settings.toml
export PATH=$PWD/.venv/bin:$PATH
mkdir -p "$CAVVY_HOME" "$state/devices" && chmod 700 "$CAVVY_HOME"
cp -r examples/edge-digits "$state/task"
# `make demo-edge` has installed what the jobs need here, so they install nothing
sed -i -e '/^setup:/,/^$/d' -e "s#^run: python3 #run: >-\\n  '$PWD/.venv/bin/python' #" "$state"/task/*.yaml
if [ -t 1 ]; then bold=$'\e[1m' blue=$'\e[1;34m' plain=$'\e[0m'; else bold='' blue='' plain=''; fi
heading() { printf '\n%s%s%s\n' "$blue" "$*" "$plain"; }
show() {
    printf '%s$ %s%s\n' "$bold" "$*" "$plain"
    "$@"
}
link=
join_link() {
    if [ "$inner" = "$outer" ]; then edge links up 10; return; fi
    .venv/bin/python scripts/demo_edge.py "$state" link "$outer" "$inner" 9>&- & link=$!
}
cut_link() {
    if [ -n "$link" ]; then kill "$link" 2>/dev/null || true; wait "$link" 2>/dev/null || true; fi
    edge links down 10
}
await_answers() {  # a bad version is only seen by requests
    for _ in {1..600}; do
        [ ! -f "$state/answers" ] || return 0
        kill -0 "$load" 2>/dev/null || break
        sleep 0.1
    done
    echo "the devices answer no requests" >&2
    return 1
}
leave() {
    trap '' INT TERM HUP
    kill $(jobs -p) 2>/dev/null || true
    if [ -f "$CAVVY_CONFIG" ]; then
        cavvy nodes down --all --yes >/dev/null 2>&1 || true
        cavvy server stop >/dev/null 2>&1 || true
    fi
    edge stop >/dev/null || true
}
trap leave EXIT
network=$(edge network 10)
read -r host outer inner <<<"$network"
cat >"$CAVVY_CONFIG" <<T
[server]
tls_listen = "$host:$inner"
advertise = "https://$host:$outer"
T

heading "1. Ten devices enrol with one token; each makes its own key"
[ "$inner" = "$outer" ] || join_link
token=$(cavvy edge token --site lyon --count 10 2>/dev/null)
printf '%s$ cavvy edge token --site lyon --count 10%s\n%s\n' "$bold" "$plain" "$token"
edge start 10 <<<"$token"

heading "2. One graph of jobs: train on 60 images, publish, test, deploy to one device, 30 %, all; then collect and train again"
show cavvy run "$state/task/loop.yaml" --detach --yes --param soak=1s
edge await 1 10
show cavvy edge list

heading "3. The links to the server break. All devices go on serving:"
cut_link
edge load 300
join_link

heading "4. A bad version, which refuses every request, goes to one device first. The device answers with the old one"
show cavvy run "$state/task/task.yaml" --param bad=true --name edge-bad --yes
show cavvy model publish edge-bad --name digits
.venv/bin/python scripts/demo_edge.py "$state" load 300 --until-halted 9>&- & load=$!
await_answers
show cavvy edge deploy digits@2 --soak 1s --waves 0%,30%,100%
wait "$load"
edge await 1 10
show cavvy edge rollouts

heading "5. Devices keep the images of which they are not sure. When 100 have come, the graph goes on: train, publish, test, deploy"
show cavvy status collect
edge load 300 --new
edge await 3 10
show cavvy wait deploy-better
show cavvy ps
edge load 300 --unseen
show cavvy edge list
