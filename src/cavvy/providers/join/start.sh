# Runs on a machine that joins: sh -s -- TOKEN [--background]
mode=
if [ "${1:-}" = --background ]; then mode=$1; shift; fi
token=${1:-}
cavvy_start || exit 1
cavvy_fetch "$far" "$far.pyz" || exit 1
export CAVVY_JOIN_TOKEN="$token"
# If a Python was fetched, $CAVVY_PYTHON consists of several words.
set -- -I -S "$CAVVY_FOLDER/$far.pyz" "$CAVVY_ADDRESS" "$CAVVY_PIN" "$place" "$CAVVY_FOLDER" "$CAVVY_PYTHON"
case $mode in
  --background)
    trap '' HUP
    $CAVVY_PYTHON "$@" >>"$CAVVY_FOLDER/joined.log" 2>&1 </dev/null &
    cavvy_say "joining in the background; its log is $CAVVY_FOLDER/joined.log, its process $!"
    ;;
  *) exec $CAVVY_PYTHON "$@" </dev/null ;;
esac
