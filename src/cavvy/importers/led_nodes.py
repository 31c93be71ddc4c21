"""Shell lines for tasks of other tools whose nodes depend on other nodes: tasks that start MPI,
dstack's `startup_order: workers-first` and `stop_criteria: master-done`, and SkyPilot jobs that
start processes in the background.

SkyPilot and dstack connect the nodes with SSH. Here, `$CAVVY_MPI` connects them: on rank 0 (the
master) it waits for the other ranks, and then runs the author's commands, in which `mpirun` starts
processes on the other ranks. The other ranks run the author's commands, too, and do what rank 0
asks until rank 0 ends.

On a SkyPilot node, processes that the commands started, such as a Ray worker, continue to run after
the commands have ended. When the commands of a node end, Cavvy ends all processes of the node. The
shell lines for these jobs make each node wait until the commands of all nodes have succeeded: a
helper process on each node connects to the first node. A node that has ended is not waited for. If
a node does not connect to the first node, the others wait for it for at most a minute.
"""

import re

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
# Matches commands that probably start a process that continues to run after them.
STARTS_PROCESSES = re.compile(
    r"(?<![&>|\\])&(?=[\s)]|$)|\b(ray start|nohup|setsid)\b|--daemon|docker run .*-d\b"
)
# The argument of the helper is the path of a file. The shell writes to this file when the commands
# have succeeded, and the helper removes the file when the helper exits.
_HELPER = """\
import os, select, socket, sys, time
mark, since = sys.argv[1], []
def done():
    if not since and os.path.getsize(mark):
        since.append(time.monotonic())
    return bool(since)
def missing():
    return done() and time.monotonic() > since[0] + 60
def serve(port, others):
    server, working, ended = socket.create_server(("", port)), [], []
    while not done() or working or (len(ended) < others and not missing()):
        for each in select.select([server, *working], [], [], 0.3)[0]:
            if each is server:
                working.append(server.accept()[0])
                continue
            data = each.recv(99)
            if data != key:
                working.remove(each)
            if data in (b"", b".", key + b"."):
                ended.append(each)
def follow(address):
    node = None
    while node is None:
        try:
            node = socket.create_connection(address, 10)
        except OSError:
            if missing():
                return
            time.sleep(0.3)
    node.settimeout(None)
    node.sendall(key)
    while not done():
        if select.select([node], [], [], 0.3)[0]:
            return
    node.sendall(b".")
    node.recv(1)
try:
    port = int(os.environ["MASTER_PORT"]) + 2
    key = "{CAVVY_JOB_ID}-{CAVVY_ATTEMPT};".format(**os.environ).encode()
    if os.environ["NODE_RANK"] == "0":
        serve(port, int(os.environ["NNODES"]) - 1)
    else:
        follow((os.environ["MASTER_ADDR"], port))
finally:
    os.unlink(mark)
"""
KEEPER = f"""\
if command -v python3 >/dev/null 2>&1; then
  _mark="$(mktemp)"
  _helper="$(python3 -c '{_HELPER}' "$_mark" >/dev/null 2>&1 </dev/null & echo $!)"
  trap '_code=$?
  if [ $_code = 0 ] && [ -e "$_mark" ]; then
    echo >> "$_mark"
    while [ -e "$_mark" ] && kill -0 "$_helper" 2>/dev/null; do sleep 0.3; done
  fi
  rm -f "$_mark"
  exit $_code' EXIT
fi
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
