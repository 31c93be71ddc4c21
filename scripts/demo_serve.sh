#!/usr/bin/env bash
# Serving in a minute: a cold start, requests that wait, scale-up, a killed replica, a canary that is rolled back, the bill.
# Called by `make demo-serve`. It keeps everything in .cache/demo-serve (or DEMO_FOLDER) and stops what it started.
# It needs no network and no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
state=${DEMO_FOLDER:-$PWD/.cache/demo-serve}
folder=$state/hello
export CAVVY_HOME=$state/home CAVVY_CONFIG=$state/settings.toml
export PATH=$PWD/.venv/bin:$PATH
mkdir -p "$CAVVY_HOME" "$folder" && chmod 700 "$CAVVY_HOME"
cat >"$CAVVY_CONFIG" <<'T'
# This machine costs 3.60 dollars an hour, so that the demo's bill is not zero.
[providers.local]
price_usd_hr = 3.60
T
cp examples/serve-hello/hello.py "$folder"
cat >"$folder/service.yaml" <<'T'
name: hello
workdir: .
resources: {cpu: 0.2, memory: 64MiB}
run: exec python3 hello.py
env: {WORK_S: 0.05}
service:
  port: 8000
  replicas: {min: 0, max: 3, target: {queue_wait: 200ms}, idle: 5m}
  concurrency: 2
  probe: /health
  update: {strategy: canary, weight: 30%, requests: 1000}
T

if [ -t 1 ]; then bold=$'\e[1m' blue=$'\e[1;34m' plain=$'\e[0m'; else bold='' blue='' plain=''; fi
heading() { printf '\n%s%s%s\n' "$blue" "$*" "$plain"; }
show() {
    printf '%s$ %s%s\n' "$bold" "$*" "$plain"
    "$@"
}
load() { show .venv/bin/python scripts/demo_serve_load.py "$url" "$@"; }
field() { cavvy services show hello -o json | .venv/bin/python -c "import json, sys; found = json.load(sys.stdin); print($1)"; }
# Each step asserts what it says: the demo fails if it did not happen.
replicas() { field '"\n".join(each["job"] for each in found["replicas"])'; }
check() {
    if ! eval "$1"; then echo "the demo failed: $2" >&2; exit 1; fi
}
await() {
    for _ in $(seq 240); do
        if eval "$1"; then return; fi
        sleep 0.5
    done
    check false "$2"
}
leave() {
    cavvy nodes down --all --yes >/dev/null 2>&1 || true
    cavvy server stop >/dev/null 2>&1 || true
}
trap leave EXIT

echo "A service on this machine that needs only Python. The machine's price of \$3.60/h is made up."

heading "1. Start a service. No replica runs yet, so nothing is billed:"
show cavvy serve "$folder/service.yaml" --yes
url=$(field 'found["url"]')
check '[ -z "$(replicas)" ]' "a replica runs before the first request"

heading "2. Fifty requests at once: they wait until a replica runs, and all are answered:"
load 50 --at-once 50

heading "3. More load than one replica can take: several answer it"
load 600 --at-once 60 --replicas 2
show cavvy services

heading "4. A replica is killed under load: its requests are repeated elsewhere, and another one is ordered"
before=$(replicas)
load 400 --at-once 8 --per-s 40 --kill-after 100
await '[ -n "$(comm -13 <(sort <<<"$before") <(replicas | sort))" ]' "no replica was ordered for the killed one"

heading "5. A new revision takes three times as long. It gets 30% of the requests, is found out, and is rolled back:"
sed 's/WORK_S: 0.05/WORK_S: 0.15/' "$folder/service.yaml" >"$folder/slower.yaml"
show cavvy serve "$folder/slower.yaml" --yes
for _ in $(seq 20); do
    load 100 --at-once 4 --per-s 25
    [ -z "$(field '(found["trial"] or {}).get("end", "")')" ] || break
done
shown=$(show cavvy services show hello)
echo "$shown"
check 'grep -q "revision 2 was rolled back: .*; [1-9][0-9]* requests" <<<"$shown"' "the slower revision got no requests, or was not rolled back"

heading "6. The bill: replicas are jobs, so it has each of them"
show cavvy stop hello
show cavvy cost --by tag:service
bill=$(show cavvy cost --by job)
echo "$bill"
check '[ "$(grep -c "^hello\." <<<"$bill")" -ge 4 ]' "the bill lacks replicas: at least two answered, one came for the killed one, and one was slower"
