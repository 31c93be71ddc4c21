# Runs on a machine that joins: sh -s -- TOKEN [--background]
mode=
if [ "${1:-}" = --background ]; then mode=$1; shift; fi
token=${1:-}
remuda_start || exit 1
remuda_fetch "$far" "$far.pyz" || exit 1
export REMUDA_JOIN_TOKEN="$token"
# $REMUDA_PYTHON is several words where a Python was brought.
set -- -I -S "$REMUDA_FOLDER/$far.pyz" "$REMUDA_ADDRESS" "$REMUDA_PIN" "$place" "$REMUDA_FOLDER" "$REMUDA_PYTHON"
case $mode in
  --background)
    trap '' HUP
    $REMUDA_PYTHON "$@" >>"$REMUDA_FOLDER/joined.log" 2>&1 </dev/null &
    remuda_say "joining in the background; its log is $REMUDA_FOLDER/joined.log, its process $!"
    ;;
  *) exec $REMUDA_PYTHON "$@" </dev/null ;;
esac
