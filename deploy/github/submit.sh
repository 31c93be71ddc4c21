# The step of action.yml. It reads TASK, SERVER, ARGUMENTS, VERSION and CAVVY_TOKEN.
set -euo pipefail

command -v cavvy >/dev/null || python3 -m pip install --quiet "cavvy$VERSION"
[ -n "$CAVVY_TOKEN" ] || unset CAVVY_TOKEN
[ -z "$SERVER" ] || cavvy login "$SERVER"

# GitHub cancels a job by SIGINT and SIGTERM. Bash runs a trap after the command in the foreground.
cancelled=""
trap 'cancelled=1' INT TERM
stop() {
  cavvy stop $jobs --project "$project" --no-wait
  exit 130
}

read -ra arguments <<<"$ARGUMENTS"
made=$(cavvy run --detach --yes --output json "${arguments[@]}" "$TASK")
# one job, or the jobs of a file with several tasks
rows=$(python3 -c '
import json, sys
found = json.load(sys.stdin)
for job in found if isinstance(found, list) else [found]:
    print(job["id"], job["project"], job["name"])' <<<"$made")
jobs=$(cut -d " " -f 1 <<<"$rows" | xargs)
project=$(cut -d " " -f 2 <<<"$rows" | head -n 1)
echo "job=$jobs" >>"$GITHUB_OUTPUT"

[ -z "$cancelled" ] || stop
trap stop INT TERM
code=0
while read -r id project name; do
  echo "::group::$name"
  cavvy logs --follow "$id" --project "$project" </dev/null & wait $! || code=$((code ? code : $?))
  echo "::endgroup::"
  {
    printf '### %s\n```\n' "$name"
    cavvy cost "$id" --project "$project" </dev/null
    printf '```\n'
  } >>"$GITHUB_STEP_SUMMARY"
done <<<"$rows"
[ "$code" = 0 ] && outcome=success || outcome=failure
echo "outcome=$outcome" >>"$GITHUB_OUTPUT"
exit "$code"
