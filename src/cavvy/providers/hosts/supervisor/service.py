"""Serves one connection of the control plane: launches, observes, removes and forgets the gangs of
one installation on this host.

A request `{"id", "do", ...}` is answered by `{"id", "answer"}` or `{"id", "error", "kind"}`.
`{"changed": GANG}` reports that the state of a gang has changed.

The supervisor stores these files:

* `ROOT/agents/NAME/gang.json` contains the control plane's intent and the agent's command.
* `ROOT/agents/NAME/removing.json` exists during the removal of a gang, and contains the time when
  the agents are killed.
* `ROOT/agents/NAME/RANK/config.json` contains the agent's configuration; `devices` lists the rank's
  devices.
* `ROOT/agents/NAME/RANK/round` exists if the rank replaces a lost one, and contains the number of
  the round that asked for it.
* `ROOT/agents/NAME/RANK/run.json` describes the process that runs the agent and writes the agent's
  exit code to `left`.
* `ROOT/agents/NAME/RANK/dead.json` states how the rank ended, and never changes.
* `ROOT/over/NAME` exists if the gang NAME must not be launched again.
* `ROOT/volumes/PROJECT/NAME` contains the files of a named volume.
* `ROOT/gangs/NAME/RANK` is the home of the rank. The work can change everything in it, so the
  supervisor obeys nothing that it finds there.

The supervisor stores all state on disk, and every request may be repeated. A ValueError is reported
as `refused`, a LockBusy as `busy` (another gang holds the device), and an OSError as `again`.
"""

from __future__ import annotations

import glob
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

from .facts import try_agent
from .files import (
    ChangedProgram,
    FileLock,
    check_programs,
    open_own,
    read_json,
    read_own,
    read_text,
    remove_file,
    write_json,
    write_text,
)
from .frames import FrameReader, encode_frame
from .processes import (
    GANG_MARK,
    RANK_MARK,
    boot,
    find_command,
    identify,
    is_overdue,
    list_marked,
    lives,
    make_removal,
    send,
)
from .takeover import EARLIER, take_over
from .volumes import find_volume, list_volumes, make_volumes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

PARTS_SLACK = 1e-5  # sums of parts of a device are not exact
REAPER_S = 3.0  # seconds that the reaper of a killed agent has to end the work
PATIENCE_S = 5.0  # seconds for the agents' last reports, after the gang's grace period
DELIVERING = "the agent's last messages are being delivered"
DELIVERIES = 3  # maximum attempts to deliver an agent's last reports, while a server answers
SOON_S = 0.1  # seconds between checks of processes that should end
POLL_S = 1.0  # seconds between checks of deliveries, and of agents without pidfd
TOMBSTONE_S = 7 * 24 * 3600.0
# Runs the agent and records its exit code. The shell itself ignores the signals that its process
# group receives. The script first removes `.new`, because the work may have left a link there.
WRAPPER = """trap : TERM INT HUP; "$@"; code=$?
rm -rf "$0.new"; echo "$code" > "$0.new" && mv "$0.new" "$0\""""
KEPT = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY",
    "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
})  # fmt: skip


class LockBusy(Exception):
    """Raised if another gang uses a requested device."""


class HostSupervisor:
    """Serves one connection. All state is on disk; the attributes are only a copy of it, which
    serves to notice changes and to report them immediately.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._earlier = True  # whether an earlier version may have left gangs
        self._blocked = False  # True while the output pipe is full
        self._changed = False  # whether a job has changed a program that this supervisor starts
        self._children: list[subprocess.Popen[bytes]] = []
        self._watched: dict[int, int] = {}  # pidfd -> PID
        self._removals: dict[str, Fields] = {}  # the gang's folder -> its removal in progress
        self._told: dict[str, str] = {}  # gang -> the state in the last report
        # rank folder -> the time when the agent was first found dead while its processes still ran
        self._orphaned: dict[str, float] = {}
        # the folders of ranks whose agent this process has seen running
        self._alive: set[str] = set()
        self._poll = select.poll()
        self._out = b""
        # the time to kill all gangs, by the monotonic clock; set if this host is leaving
        self._kill_all_at: float | None = None

    def serve(self) -> None:
        """Answer requests until standard input ends."""
        self._succeed()
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self._poll.register(0, select.POLLIN)
        frames = FrameReader()
        while True:
            pause = self._tend()
            self._flush()
            if self._changed:
                return  # the control plane connects again, and sends what is missing
            for fd, _ in self._poll.poll(None if pause is None else pause * 1000):
                if fd in self._watched:
                    self._poll.unregister(fd)
                    os.close(fd)
                    del self._watched[fd]
                elif fd == 0:
                    try:
                        read = os.read(0, 1 << 20)
                    except BlockingIOError:
                        continue
                    if not read:
                        return
                    for asked, _ in frames.feed(read):
                        self._answer(asked)

    def _answer(self, asked: Fields) -> None:
        try:
            with FileLock(self._root + "/lock"):
                self._take_over()
                answer = {"id": asked["id"], "answer": getattr(self, "do_" + asked["do"])(asked)}
        except LockBusy as error:
            answer = {"id": asked["id"], "kind": "busy", "error": str(error)}
        except OSError as error:
            answer = {"id": asked["id"], "kind": "again", "error": str(error)}
        except ValueError as error:
            answer = {"id": asked["id"], "kind": "refused", "error": str(error)}
        except Exception as error:  # noqa: BLE001 - a connection that ends would not say why
            text = f"the supervisor failed: {type(error).__name__}: {error}"
            answer = {"id": asked["id"], "kind": "again", "error": text}
        self._say(answer)

    def _say(self, value: Fields) -> None:
        self._out += encode_frame(value)

    def _flush(self) -> None:
        """Write as much as the pipe accepts and keep the rest for later, so a control plane that
        reads nothing does not block the supervisor.
        """
        try:
            while self._out:
                self._out = self._out[os.write(1, self._out) :]
        except BlockingIOError:
            self._poll.register(1, select.POLLOUT)
            self._blocked = True
            return
        if self._blocked:
            self._poll.unregister(1)
            self._blocked = False

    def _succeed(self) -> None:
        """Kill an earlier supervisor that has not noticed the loss of its connection, because only
        one supervisor may run.
        """
        path = self._root + "/supervisor.json"
        with FileLock(self._root + "/lock"):
            earlier = read_json(path)
            if earlier is not None and lives(earlier) and earlier["pid"] != os.getpid():
                os.kill(earlier["pid"], signal.SIGKILL)
            write_json(path, identify(os.getpid()) or {})

    def _take_over(self) -> None:
        """Take over the gangs of an earlier version, once. Raises OSError."""
        if self._earlier:
            command = read_text("/proc/self/cmdline").split("\0")
            known = sys.argv[0] in command
            start = command[: command.index(sys.argv[0])] if known else [sys.executable, "-I", "-S"]
            take_over(self._root, start)
            self._earlier = False

    # Requests

    def do_launch(self, asked: Fields) -> Fields:
        """Start all given ranks of a gang, or none of them. Do nothing if the gang exists or has
        ended.
        """
        name = check_name(asked["gang"])
        folder = self._folder(name)
        if os.path.exists(self._root + "/over/" + name):
            return {"over": True}
        if not os.path.exists(folder + "/gang.json"):
            self._prepare(folder, asked)
        if self._removal(folder) is None:
            # All homes exist before the first work can put something else in their place.
            for rank in asked["ranks"]:
                os.makedirs(self._home(name, str(rank["rank"])), 0o700, exist_ok=True)
            for rank in asked["ranks"]:
                self._start_missing(name, str(rank["rank"]))
        return {"over": False, "gang": self._look(name)}

    def do_replace(self, asked: Fields) -> Fields:
        """Start the given ranks of a gang again. Unless `starts` is set, only end what is left of
        them, since the control plane first notes how they have ended. Do nothing for a rank that
        this round has started, or if the gang has ended or is being removed.
        """
        name = check_name(asked["gang"])
        folder = self._folder(name)
        if os.path.exists(self._root + "/over/" + name) or self._removal(folder) is not None:
            return {"waits": False}
        if not os.path.exists(folder + "/gang.json"):
            self._prepare(folder, dict(asked, ranks=[]))
        for each in asked["ranks"]:
            rank = str(each["rank"])
            if read_text(f"{folder}/{rank}/round") == str(asked["round"]):
                self._start_missing(name, rank)
                continue
            there = os.path.exists(f"{folder}/{rank}")
            if there and self._rank(name, rank, None)["state"] != "over":
                self._terminate(name, rank)
                return {"waits": True}
            if not asked["starts"]:
                return {"waits": True}
            if there:
                self._discard(f"{folder}/{rank}", self._home(name, rank))
            self._renew(name, rank, each, asked)
        return {"waits": False}

    def _renew(self, name: str, rank: str, each: Fields, asked: Fields) -> None:
        """Write the records of a rank that replaces a lost one, and start it."""
        folder = self._folder(name)
        shared, fresh = os.path.dirname(os.path.dirname(self._root)), f"{folder}/.new-{rank}"
        with FileLock(shared + "/devices.lock"):
            check_free(shared, dict(parts_of(each)))
            shutil.rmtree(fresh, ignore_errors=True)
            write_json(
                folder + "/gang.json",
                {"intent": asked["intent"], "command": asked["command"], "boot": boot()},
            )
            self._write_rank(folder, fresh, each)
            write_text(fresh + "/round", str(asked["round"]))
            os.rename(fresh, f"{folder}/{rank}")
        os.makedirs(self._home(name, rank), 0o700, exist_ok=True)
        self._start_missing(name, rank)

    def _write_rank(self, folder: str, fresh: str, rank: Fields) -> None:
        """Write the configuration and the devices of a rank to the new folder `fresh`."""
        os.mkdir(fresh, 0o700)
        config = dict(rank["config"], private=f"{folder}/{rank['rank']}")
        write_json(f"{fresh}/config.json", config)
        lines = [f"{name} {part:g}\n" for name, part in parts_of(rank)]
        write_text(f"{fresh}/devices", "".join(lines))

    def do_look(self, asked: Fields) -> Fields:
        """Return the state of every gang of this installation on this host, and the names of its
        volumes, with the host's time.
        """
        gangs = [self._look(name) for name in self._names()]
        volumes = None
        with suppress(OSError):
            volumes = list_volumes(self._root)
        return {"now": time.time(), "gangs": gangs, "volumes": volumes}

    def do_remove(self, asked: Fields) -> Fields:
        """Stop a gang. Agents that still run after the grace period are killed. If `forbid` is set,
        a gang with this name cannot be launched later.
        """
        name = check_name(asked["gang"])
        folder = self._folder(name)
        if os.path.exists(folder + "/gang.json") and self._removal(folder) is None:
            seconds = asked["grace_s"] + PATIENCE_S if asked["grace_s"] >= 0 else 0
            try:
                self._note_removal(folder, seconds)
            finally:  # if the disk is full, the caller repeats its request
                for rank in self._ranks(name):
                    self._terminate(name, rank)
        if asked.get("forbid"):
            self._bury(name)
        return {}

    def _note_removal(self, folder: str, seconds: float) -> None:
        """Record a removal in memory and then on disk. Raises OSError."""
        self._removals[folder] = make_removal(seconds)
        write_json(folder + "/removing.json", self._removals[folder])

    def _removal(self, folder: str) -> Fields | None:
        """Return the record of a gang's removal, or None if the gang is not being removed."""
        return read_json(folder + "/removing.json") or self._removals.get(folder)

    def do_leave(self, asked: Fields) -> Fields:
        """Prepare for this host's departure: signal agents as in a preemption, and kill them after
        `grace_s`.
        """
        for name in self._names():
            for rank in self._ranks(name):
                if read_json(f"{self._folder(name)}/{rank}/dead.json") is None:
                    self._terminate(name, rank)
        self._kill_all_at = time.monotonic() + asked["grace_s"] + PATIENCE_S
        return {}

    def do_forget(self, asked: Fields) -> Fields:
        """Delete an ended gang's files, after the control plane has recorded the gang's end."""
        name = check_name(asked["gang"])
        folder = self._folder(name)
        if any(read_json(f"{folder}/{rank}/dead.json") is None for rank in self._ranks(name)):
            return {}
        self._bury(name)
        self._told.pop(name, None)
        self._removals.pop(folder, None)
        self._discard(folder, f"{self._root}/gangs/{name}")
        return {}

    def do_relay(self, asked: Fields) -> Fields:
        """Redirect agents to a new socket for the control plane. Agents always connect to the
        symbolic link `sock`, so the link is changed to the new socket.
        """
        name = asked["socket"]
        os.chmod(f"{self._root}/{name}", 0o600)
        remove_file(self._root + "/sock.new")
        os.symlink(name, self._root + "/sock.new")
        os.rename(self._root + "/sock.new", self._root + "/sock")
        for old in glob.glob(glob.escape(self._root) + "/s-*"):
            if os.path.basename(old) != name:
                remove_file(old)
        return {}

    def do_remove_volume(self, asked: Fields) -> Fields:
        """Delete a named volume that no gang on this host uses. Do nothing if there is none."""
        project, name = asked["project"], asked["name"]
        path = find_volume(self._root, project, name)
        if path is None:
            return {}
        for gang in self._names():
            seen = self._look(gang)
            intent = seen["intent"] or {}
            uses = intent.get("project") == project and name in (intent.get("volumes") or ())
            if uses and any(rank["state"] != "over" for rank in seen["ranks"]):
                raise ValueError(f"the gang {gang} uses the volume {name}")
        os.chmod(path, 0o700)  # a folder that may not be written cannot be moved
        self._discard(path)
        return {}

    def do_try_separation(self, asked: Fields) -> Fields:
        """Let the agent test whether this host can separate the jobs of different projects."""
        self._check(asked["command"])
        told = try_agent(asked["command"], "--separates", self._root, make_environ())
        return {"obstacle": told}

    def do_try_protection(self, asked: Fields) -> Fields:
        """Let the agent test what namespaces can do on this host to protect it from jobs."""
        told = try_agent(asked["command"], "--protects", self._root, make_environ())
        return {"ability": told}

    # Launching

    def _prepare(self, folder: str, asked: Fields) -> None:
        fresh = f"{self._root}/agents/.new-{os.path.basename(folder)}"
        for unfinished in glob.glob(glob.escape(self._root) + "/agents/.new-*"):
            shutil.rmtree(unfinished, ignore_errors=True)  # the host broke down during a launch
        shared = os.path.dirname(os.path.dirname(self._root))
        with FileLock(shared + "/devices.lock"):  # shared with the other installations on this host
            check_free(shared, dict(each for rank in asked["ranks"] for each in parts_of(rank)))
            intent = asked["intent"] or {}  # machines of clouds have none
            make_volumes(self._root, intent.get("project", ""), intent.get("volumes", []))
            try:
                os.makedirs(fresh, 0o700)
                write_json(
                    fresh + "/gang.json",
                    {"intent": asked["intent"], "command": asked["command"], "boot": boot()},
                )
                for rank in asked["ranks"]:
                    self._write_rank(folder, f"{fresh}/{rank['rank']}", rank)
                os.rename(fresh, folder)
            except OSError:
                shutil.rmtree(fresh, ignore_errors=True)
                raise

    def _start_missing(self, name: str, rank: str) -> Fields | None:
        """Return the process of a rank. Start the process if it was never started. Return None if
        the host was rebooted since the launch.
        """
        folder = f"{self._folder(name)}/{rank}"
        known = read_json(folder + "/run.json")
        if known is not None or any(os.path.exists(f"{folder}/{e}") for e in ("left", EARLIER)):
            return known
        # The agent may have been started just before an earlier supervisor was killed. The oldest
        # process is the leader of the group.
        found = min(
            find_command(folder + "/config.json"),
            key=lambda each: (each["start"], each["pid"]),
            default=None,
        )
        gang = read_json(self._folder(name) + "/gang.json") or {}
        if found is None and (os.path.exists(folder + "/lock") or gang.get("boot") != boot()):
            return None
        run = found or self._spawn(name, rank, [], "left")
        write_json(folder + "/run.json", run)
        self._watch(run)
        return run

    def _spawn(self, name: str, rank: str, options: list[str], note: str) -> Fields:
        folder = f"{self._folder(name)}/{rank}"
        command = (read_json(self._folder(name) + "/gang.json") or {})["command"]
        self._check(command)
        environ = dict(make_environ(), **{GANG_MARK: name, RANK_MARK: rank})
        with open(folder + "/agent.log", "ab", opener=open_own) as log:
            child = subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    WRAPPER,
                    f"{folder}/{note}",
                    *command,
                    *options,
                    folder + "/config.json",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                cwd="/",
                start_new_session=True,
            )
        self._children.append(child)
        return identify(child.pid) or {"pid": child.pid, "start": 0, "boot": boot()}

    def _check(self, command: list[str]) -> None:
        try:
            check_programs(command)
        except ChangedProgram:
            self._changed = True
            raise

    # Polling

    def _look(self, name: str) -> Fields:
        folder = self._folder(name)
        removing = self._removal(folder)
        gang = read_json(folder + "/gang.json") or {}
        ranks = [
            dict(self._rank(name, rank, removing), round=self._round(name, rank))
            for rank in self._ranks(name)
        ]
        return {
            "name": name,
            "intent": gang.get("intent"),
            "removing": removing is not None,
            "ranks": ranks,
        }

    def _round(self, name: str, rank: str) -> int:
        text = read_text(f"{self._folder(name)}/{rank}/round")
        return int(text) if text else 0

    def _rank(self, name: str, rank: str, removing: Fields | None) -> Fields:
        """Return the current state of one rank: "runs", "ends" or "over". Kill the processes that a
        dead agent left behind.
        """
        folder = f"{self._folder(name)}/{rank}"
        dead = read_json(folder + "/dead.json")
        if dead is not None:
            return {"rank": int(rank), "state": "over", **dead}
        overdue = is_overdue(removing)
        run = (
            self._start_missing(name, rank) if removing is None else read_json(folder + "/run.json")
        )
        files = self._files(name, rank)
        left = read_own(folder + "/left")  # an agent of an earlier version writes it elsewhere
        seen = {"rank": int(rank), "pid": run["pid"] if run else None}
        if run is not None and not left and lives(run) and not overdue:
            self._alive.add(folder)
            self._watch(run)
            return {**seen, "state": "runs"}
        in_order = left == "0"
        if (not in_order or overdue) and self._rest_lives(name, rank, overdue):
            return {
                **seen,
                "state": "ends",
                "why": "processes that the agent left behind are being killed",
            }
        undelivered = not in_order or os.path.exists(files + "/undelivered")
        if undelivered and self._follow_up(name, rank, removing):
            return {**seen, "state": "ends", "why": DELIVERING}
        return self._bury_rank(name, rank, {"pid": seen["pid"], "in_order": in_order}, run)

    def _bury_rank(self, name: str, rank: str, dead: Fields, run: Fields | None) -> Fields:
        """Record the end of a rank. The record of a rank's end is written once and never
        changed."""
        folder = f"{self._folder(name)}/{rank}"
        dead = dict(
            dead,
            at=self._died_at(name, rank),
            exit=read_json(self._files(name, rank) + "/exit.json"),
            rebooted=run is not None and run["boot"] != boot(),
            complaint=(read_own(folder + "/agent.log").splitlines() or [""])[-1][:500],
        )
        write_json(folder + "/dead.json", dead)
        self._alive.discard(folder)
        return {"rank": int(os.path.basename(folder)), "state": "over", **dead}

    def _rest_lives(self, name: str, rank: str, at_once: bool) -> bool:
        """Return whether processes of a dead agent still run. Normally, the agent's reaper ends the
        agent's processes. This method kills processes that still run after `REAPER_S`.
        """
        folder = f"{self._folder(name)}/{rank}"
        left = list_marked(name, rank)
        if not left:
            self._orphaned.pop(folder, None)
            return False
        since = self._orphaned.setdefault(folder, time.monotonic())
        if at_once or time.monotonic() - since >= REAPER_S:
            for pid in left:
                send(pid, signal.SIGKILL)
        return True

    def _follow_up(self, name: str, rank: str, removing: Fields | None) -> bool:
        """Remove a dead agent's container, and deliver the agent's log and exit record. Return True
        while the removal or the delivery is still running.
        """
        folder = f"{self._folder(name)}/{rank}"
        engine = next((each for each in ("podman", "docker") if shutil.which(each)), None)
        boxed = os.path.exists(self._home(name, rank) + "/entry.sh")
        boxed = boxed and not os.path.exists(folder + "/removed")
        if engine is not None and boxed:
            write_text(folder + "/removed", "")
            self._run_aside([engine, "rm", "-f", f"{name}-{rank}"])
            return True
        if self._sweep(name, rank, folder):
            return True
        begun = os.path.exists(self._files(name, rank) + "/started")
        if removing is not None or not begun:
            return False
        return self._deliver(name, rank, folder)

    def _sweep(self, name: str, rank: str, folder: str) -> bool:
        """Let an agent remove the MIG instance that a killed agent left. Return True while it
        runs."""
        if not (read_json(folder + "/config.json") or {}).get("instance"):
            return False
        run = read_json(folder + "/sweeper.json")
        if run is None:
            run = self._spawn(name, rank, ["--sweep"], "swept")
            write_json(folder + "/sweeper.json", run)
            self._watch(run)
        return lives(run)

    def _run_aside(self, command: list[str]) -> None:
        null = subprocess.DEVNULL
        self._children.append(subprocess.Popen(command, stdin=null, stdout=null, stderr=null))

    def _deliver(self, name: str, rank: str, folder: str) -> bool:
        """Start the delivery of the messages that an agent left on disk. Return True while the
        delivery is still running. While no server answers, the delivery is repeated for days,
        because the server may be down for longer than the gang's lease.
        """
        last = read_json(folder + "/deliver.json") or {"run": None, "tries": 0}
        if (
            last["run"] is not None
            and not os.path.exists(folder + "/delivered")
            and lives(last["run"])
        ):
            return True
        said = read_own(folder + "/delivered")
        unheard = said == str(os.EX_TEMPFAIL) and (
            time.time() - self._died_at(name, rank) < TOMBSTONE_S
        )
        if said == "0" or (last["tries"] >= DELIVERIES and not unheard):
            return False
        if not self._can_deliver(name, rank):
            return False
        remove_file(folder + "/delivered")
        run = self._spawn(name, rank, ["--deliver"], "delivered")
        write_json(folder + "/deliver.json", {"run": run, "tries": last["tries"] + (not unheard)})
        self._watch(run)
        return True

    def _can_deliver(self, name: str, rank: str) -> bool:
        """Return whether the records of the rank allow a delivery; those of earlier versions may
        be too damaged.
        """
        command = (read_json(self._folder(name) + "/gang.json") or {}).get("command")
        return bool(command) and os.path.exists(f"{self._folder(name)}/{rank}/config.json")

    def _died_at(self, name: str, rank: str) -> float:
        seen = f"{self._folder(name)}/{rank}" in self._alive
        return find_death(self._files(name, rank), time.time() if seen else None)

    # Periodic work

    def _tend(self) -> float | None:
        """Advance pending removals and report changes. Return the seconds until the next call is
        needed, or None if the next call is needed only after an event.
        """
        self._children = [child for child in self._children if child.poll() is None]
        if self._kill_all_at is not None and time.monotonic() >= self._kill_all_at:
            self._remove_all()
        watched = hasattr(os, "pidfd_open")
        pauses = [POLL_S] if self._kill_all_at is not None else []
        if self._children and not watched:
            pauses.append(POLL_S)
        try:
            with FileLock(self._root + "/lock"):
                self._take_over()
                for name in self._names():
                    seen = self._look(name)
                    pauses += self._find_pause(seen, watched)
                    states = [rank["state"] for rank in seen["ranks"]]
                    self._tell(name, json.dumps([seen["removing"], states]))
        except OSError:  # the disk is full or unavailable; the next poll reports the error
            return POLL_S
        return min(pauses, default=None)

    def _find_pause(self, seen: Fields, watched: bool) -> list[float]:
        """Return a list with the seconds until the next poll of the gang. The list is empty if no
        poll is needed, because an event such as an agent's exit will wake the supervisor.
        """
        states = {rank["state"] for rank in seen["ranks"]}
        killing = any(
            rank["state"] == "ends" and rank["why"] != DELIVERING for rank in seen["ranks"]
        )
        if killing or (seen["removing"] and states != {"over"}):
            return [SOON_S]
        return [POLL_S] if "ends" in states or ("runs" in states and not watched) else []

    def _remove_all(self) -> None:
        for name in self._names():
            folder = self._folder(name)
            if self._removal(folder) is None:
                self._note_removal(folder, 0)

    def _tell(self, name: str, looks: str) -> None:
        before = self._told.get(name)
        self._told[name] = looks
        if before != looks and (before is not None or "over" in looks):
            self._say({"changed": name})

    def _watch(self, run: Fields) -> None:
        if run["pid"] in self._watched.values() or not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(run["pid"])
        except OSError:
            return
        self._watched[descriptor] = run["pid"]
        self._poll.register(descriptor, select.POLLIN)

    def _terminate(self, name: str, rank: str) -> None:
        folder = f"{self._folder(name)}/{rank}"
        run = read_json(folder + "/run.json")
        if run is not None and lives(run):
            try:
                os.killpg(
                    run["pid"], signal.SIGTERM
                )  # kill the group: the agent, and the shell that records its exit code
            except ProcessLookupError:
                return
            return
        for found in find_command(folder + "/config.json"):
            send(found["pid"], signal.SIGTERM)

    def _bury(self, name: str) -> None:
        tombs = self._root + "/over"
        os.makedirs(tombs, 0o700, exist_ok=True)
        write_text(f"{tombs}/{name}", "")
        for old in os.listdir(tombs):
            if time.time() - os.stat(f"{tombs}/{old}").st_mtime > TOMBSTONE_S:
                remove_file(f"{tombs}/{old}")

    def _discard(self, *folders: str) -> None:
        """Move folders to the trash, and delete them in the background, because the folders may be
        large. The work may have made folders in them read-only.
        """
        trash = f"{self._root}/trash"
        os.makedirs(trash, 0o700, exist_ok=True)
        for number, folder in enumerate(folders):
            if os.path.exists(folder):
                name = f"{os.path.basename(folder)}-{time.time_ns()}-{number}"
                os.rename(folder, f"{trash}/{name}")
        self._run_aside(["sh", "-c", 'rm -rf "$0" || chmod -R u+rwx "$0"; rm -rf "$0"', trash])

    def _names(self) -> list[str]:
        try:
            names = os.listdir(self._root + "/agents")
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith("."))

    def _ranks(self, name: str) -> list[str]:
        try:
            found = os.listdir(self._folder(name))
        except FileNotFoundError:
            return []
        return sorted(filter(str.isdigit, found), key=int)

    def _folder(self, name: str) -> str:
        """Return the folder of a gang's records, which separated work does not see."""
        return f"{self._root}/agents/{name}"

    def _home(self, name: str, rank: str) -> str:
        """Return the home folder of a rank, in which the work can change everything."""
        return f"{self._root}/gangs/{name}/{rank}"

    def _files(self, name: str, rank: str) -> str:
        """Return the folder in which the agent of a rank keeps its records."""
        folder = f"{self._folder(name)}/{rank}"
        return self._home(name, rank) if os.path.exists(f"{folder}/{EARLIER}") else folder


def find_death(folder: str, alive_at: float | None) -> float:
    """Return the time when a rank's agent exited, in seconds since the epoch. The time is the first
    of the following that is known: the time in the agent's own record; `alive_at`, when the agent
    was last seen running; the time of the agent's last written file.
    """
    for name in ("exit.json", "left"):
        if os.path.exists(f"{folder}/{name}"):
            return os.stat(f"{folder}/{name}").st_mtime
    if alive_at is not None:
        return alive_at
    latest = 0.0
    for name in os.listdir(folder):
        try:
            latest = max(latest, os.lstat(f"{folder}/{name}").st_mtime)
        except FileNotFoundError:
            continue
    return latest


def check_name(name: str) -> str:
    """Return the gang's name if it can be the name of a folder. Raises ValueError."""
    if not name or len(name) > 63 or not all(letter.isalnum() or letter == "-" for letter in name):
        raise ValueError(f"{name!r} is not a valid gang name")
    return name


def make_environ() -> dict[str, str]:
    """Return the variables that agents inherit."""
    kept = (name for name in os.environ if name in KEPT or name.startswith("LC_"))
    return {name: os.environ[name] for name in kept}


def parts_of(rank: Fields) -> list[tuple[str, float]]:
    """Return the devices that a rank of a launch gets, each with the part that the rank gets."""
    return [(name, rank["config"].get("device_part", 1)) for name in rank["devices"]]


def read_parts(text: str) -> dict[str, float]:
    """Return the part of each device that a rank holds, from the lines `NAME PART` of its file
    `devices`. Earlier versions wrote only the name of a whole device."""
    lines = (line.split() for line in text.splitlines())
    return {line[0]: float(line[1]) if line[1:] else 1 for line in lines if line}


def check_free(shared: str, wanted: dict[str, float]) -> None:
    """Raise LockBusy if running ranks of any installation on this host use a wanted device, or so
    much of it that the wanted part is not free.

    Normally the control plane never assigns a device to two gangs. Two gangs can get the same
    device if two control planes use one host, or if the control plane has lost its database.
    """
    paths = glob.glob(glob.escape(shared) + "/*/*/agents/*/*/devices")
    paths += glob.glob(glob.escape(shared) + "/*/*/gangs/*/*/devices")  # of earlier versions
    wanted = dict(wanted)
    for path in paths:
        parts = read_parts(read_own(path))
        held = set(wanted) & set(parts)
        folder = os.path.dirname(path)
        root, kind, name = folder.rsplit("/", 3)[:3]
        if kind == "gangs" and os.path.exists(f"{root}/agents/{name}"):
            continue  # taken over
        if held and not os.path.exists(folder + "/dead.json"):
            run = read_json(folder + "/run.json")
            gang, rank = folder.split("/")[-2:]
            if run is None or lives(run) or list_marked(gang, rank):
                for each in held:
                    wanted[each] += parts[each]
                if full := [each for each in held if wanted[each] > 1 + PARTS_SLACK]:
                    raise LockBusy(f"the gang {gang} is using {', '.join(sorted(full))}")
