"""Shell lines for tasks of other tools whose nodes depend on the master (rank 0): tasks that start
MPI, and dstack's `startup_order: workers-first` and `stop_criteria: master-done`.

SkyPilot and dstack connect the nodes with SSH. Here, `$CAVVY_MPI` connects them: on rank 0 it waits
for the other ranks, and then runs the author's commands, in which `mpirun` starts processes on the
other ranks. The other ranks run the author's commands, too, and do what rank 0 asks until rank 0
ends.
"""

_END = "_CAVVY_END_OF_COMMANDS"
# Stores the author's commands, which follow, instead of running them.
HOLD_COMMANDS = f"""\
_commands="$(cat <<'{_END}'
"""
_RUN = f"""\
{_END}
)"
_shell="$(command -v bash || command -v sh)"
if [ "$NNODES" -gt 1 ] && ! command -v "${{CAVVY_MPI%% *}}" >/dev/null 2>&1; then
  echo "the nodes cannot be connected, because this node has no Python" >&2
  @WITHOUT@
fi
if [ "$NNODES" -le 1 ]; then
  "$_shell" -c "$_commands"
  exit $?
fi
if [ "$NODE_RANK" = 0 ]; then
  $CAVVY_MPI "$_shell" -c "$_commands"
  exit $?
fi
# The file gets the exit code of this node's commands if they fail before the master has ended.
_failed="$(mktemp)"
$CAVVY_MPI true &
_master=$!
{{
  "$_shell" -c "$_commands"
  _code=$?
  if [ $_code != 0 ]; then echo $_code > "$_failed"; kill $_master 2>/dev/null; fi
}} &
_work=$!
wait $_master
_code=$?
@WAIT@
if [ -s "$_failed" ]; then _code="$(cat "$_failed")"; fi
rm -f "$_failed"
exit $_code
"""


def run_commands(*, ends_with_master: bool = False, must: bool = True) -> str:
    """Return the lines that follow the author's commands and run them. `ends_with_master` means
    that a node ends when the master has ended, and its own commands are stopped. Nodes without
    Python cannot be connected: if `must` is true, the work ends, and otherwise the commands run
    without a connection.
    """
    end = "kill $_work 2>/dev/null" if ends_with_master else "wait $_work"
    without = '"$_shell" -c "$_commands"; exit $?'
    return _RUN.replace("@WAIT@", end).replace("@WITHOUT@", "exit 1" if must else without)
