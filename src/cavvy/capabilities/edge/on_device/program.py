"""Which version of this program runs. `program.zip`, with which the device was enrolled, is started
each time and never changed by an update: it gives way to the newest version that was accepted.

A newer version is fetched into one of two slots in the same way as a model, and runs on trial. It
is accepted when it has checked in with the server and serves what its former version served. If it
ends before that in each of some starts, it is refused. If it does neither for a time, the former
version runs again, and the newer one is refused as soon as the former one checks in: it may not
have been at fault if the server cannot be reached.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

from .documents import ModelTold
from .settings import find_every_s
from .slots import PACKAGES, ModelSlots, packages_of, read_json, remove, write_json
from .tasks import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

PROGRAM = "cavvy.edge"  # its name among the models that the server signs, none of which has a dot
AGAIN = 75  # the exit code of a program that another version is to replace
# variables by which the program that was enrolled tells a version what it is
_NUMBER, _TRIAL, _DOUBTED, _LOCK, _ENDED = (
    f"CAVVY_EDGE_{each}" for each in ("NUMBER", "TRIAL", "DOUBTED", "LOCK", "ENDED")
)
# Waits for the version that was on trial, passes signals on to it, and ends or starts again as it
# asks. Its standard input is a pipe to which the version writes its exit code, and that ends with
# it.
_WAITER = """
trap 'left=1; kill -TERM "$1"' TERM INT
while :; do
  if read -r line; then code=$line; elif [ -n "${left:-}" ]; then left=; else break; fi
done
[ "${code:-1}" != "$2" ] || exec "$3" -m cavvy.edge "$4" </dev/null
exit "${code:-1}"
"""
_CHECK_INS = 10  # intervals between check-ins after which a version on trial is given up
_ENDS_S = 10.0  # within which a version that is given up must end
_LONGEST_S = 600.0  # between two tries of a fetch that fails


class DeviceOptionInvalid(ValueError):
    """Raised if the device cannot use what `edge.json` states, or a default."""


def hold(folder: str) -> int:
    """Keep other programs out of a device's folder until this one ends. Return the descriptor that
    does so, perhaps that of the version before. Raises DeviceOptionInvalid."""
    with suppress(KeyError, ValueError, OSError):
        held = int(os.environ.pop(_LOCK))
        os.fstat(held)
        return held
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        descriptor = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DeviceOptionInvalid(f"the folder {folder} cannot be used: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise DeviceOptionInvalid(
            f"another program runs this device in {folder}; end it first"
        ) from error
    return descriptor


def open_slots(folder: str) -> ModelSlots:
    return ModelSlots(f"{folder}/program/slots")


def forget_versions(folder: str) -> None:
    """Remove all versions but `program.zip`, which enrolling has replaced. The caller holds the
    folder, so no version runs."""
    remove(f"{folder}/program/slots/state.json")
    shutil.rmtree(f"{folder}/program", ignore_errors=True)


def choose(folder: str, lock: int) -> int | None:
    """Run the version that is to run, unless another one called this program. Return its exit code,
    or None if this program itself is that version. An accepted version replaces this process."""
    if _NUMBER in os.environ:
        return None
    os.environ.pop(_DOUBTED, None)
    try:
        if (code := _try_all(folder, lock)) is not None:
            return code
    except OSError as error:  # such as a full disk
        say(f"no other version of this program is tried now: {error}")
    try:
        for _ in range(2):  # a damaged version gives way to the other one
            slots = open_slots(folder)
            path = slots.find(slots.serving) if slots.check(slots.serving) else None
            if path is not None:
                variables = {_NUMBER: str(slots.serving), PACKAGES: packages_of(path)}
                _replace(folder, lock, path, variables)
    except OSError as error:  # what is here must still serve
        say(f"the program with which this device was enrolled runs: {error}")
    return None


def start_again(folder: str, lock: int) -> int:
    """Replace this process by the program that was enrolled, which chooses a version. If it called
    this one, return the exit code that asks it to."""
    if os.environ.get(_TRIAL):
        return AGAIN
    path = f"{folder}/program.zip"
    known = path if os.path.exists(path) else os.environ.get("PYTHONPATH", "")
    _replace(folder, lock, known, {})
    return AGAIN


def _replace(folder: str, lock: int, path: str, variables: dict[str, str]) -> None:
    sys.stderr.flush()
    os.set_inheritable(lock, True)
    os.execve(sys.executable, _line(folder), _make_environment(lock, path, variables))


def _line(folder: str) -> list[str]:
    return [sys.executable, "-m", PROGRAM, folder]


def _make_environment(lock: int, path: str, variables: dict[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in (_NUMBER, _TRIAL, _LOCK, _ENDED, PACKAGES)
    }
    return {**kept, **variables, _LOCK: str(lock), "PYTHONPATH": path}


def _try_all(folder: str, lock: int) -> int | None:
    """Run the version on trial, if there is one. Return the exit code if this is to end with it."""
    while number := (slots := open_slots(folder)).trial:
        path = slots.find(number) if slots.check(number) else None
        if path is None:
            slots.end_trial()
        elif slots.begin_trial(number):
            code = _try(folder, lock, number, path)
            after = open_slots(folder)
            if after.serving == number:
                if code != AGAIN:
                    return code
            elif code == 0:  # ended in good order: this is no failed trial
                after.pause_trial()
                return 0
            elif code is None:
                say(f"version {number} of this program did not check in; the former one runs again")
                after.end_trial()
                os.environ[_DOUBTED] = str(number)
    return None


def _try(folder: str, lock: int, number: int, path: str) -> int | None:
    """Run a version until it ends, and return its exit code, or None if it was given up."""
    say(f"version {number} of this program is on trial")
    every_s = find_every_s(folder)
    ended, tell = os.pipe()
    variables = {_NUMBER: str(number), _TRIAL: "1", _ENDED: str(tell)}
    variables[PACKAGES] = packages_of(path)
    environment = _make_environment(lock, path, variables)
    left: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def leave(which: int, _: object) -> None:
        left.append(which)
        for each in started:
            each.terminate()

    # before the version starts, which must not stay behind alone
    known = {each: signal.signal(each, leave) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        process = subprocess.Popen(_line(folder), env=environment, pass_fds=(lock, tell))
        os.close(tell)
        started.append(process)
        if left:
            process.terminate()
        until = time.monotonic() + _CHECK_INS * every_s
        while process.poll() is None and open_slots(folder).serving != number:
            if time.monotonic() >= until:
                _end(process)
                return None
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(1.0, every_s / 4))
        if process.poll() is None and not left:
            _wait_in_shell(folder, lock, process.pid, ended)
        code = process.wait()
    finally:
        for each, handler in known.items():
            signal.signal(each, handler)
        os.close(ended)
    return 0 if left else code


def _wait_in_shell(folder: str, lock: int, child: int, ended: int) -> None:
    """Replace this process, which needs 16 MiB, by a shell that waits for the accepted version.
    Without a shell, return."""
    path = f"{folder}/program.zip"
    known = path if os.path.exists(path) else os.environ.get("PYTHONPATH", "")
    sys.stderr.flush()
    os.set_inheritable(lock, True)
    os.dup2(ended, 0)
    words = ["sh", "-c", _WAITER, "sh", str(child), str(AGAIN), sys.executable, folder]
    with suppress(OSError):
        os.execve("/bin/sh", words, _make_environment(lock, known, {}))


def tell_end(code: int) -> None:
    """Tell the exit code of this version to the shell that waits for it, if there is one."""
    with suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ[_ENDED]), f"{code}\n".encode())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_ENDS_S)
    process.kill()
    process.wait()


class ProgramVersions:
    """The version of the program that runs here, and others. `number` is 0 for the program with
    which the device was enrolled."""

    def __init__(self, folder: str) -> None:
        self.slots, self._served = open_slots(folder), f"{folder}/program/served.json"
        self.number = int(os.environ.get(_NUMBER, "0"))
        self.on_trial = bool(os.environ.get(_TRIAL)) and self.slots.serving != self.number
        self.trouble, self.fetch_at, self._failed, self.unfetched = "", 0.0, 0, 0
        self._doubted = int(os.environ.pop(_DOUBTED, "0"))
        self._since = time.monotonic()

    def tell(self) -> list[ModelTold]:
        """Return what the server is told about the program, if it was ever to be updated."""
        told = ModelTold(
            name=PROGRAM,
            serving=self.number,
            on_trial=self.on_trial,
            refused=self.slots.refused,
            refused_in=self.slots.refused_in,
            unfetched=self.unfetched,
            problem=self.trouble or self.slots.problem,
        )
        return [] if told == ModelTold(name=PROGRAM) else [told]

    def want(self, number: int, rollout: int) -> bool:
        """Return whether a version has to be fetched or tried for a rollout."""
        refused = self.slots.is_refused(number, rollout)
        return not self.on_trial and not refused and number != self.number

    def note_wanted(self, number: int) -> None:
        """Forget why another version could not be fetched."""
        if self.unfetched not in (0, number):
            self.trouble, self.fetch_at, self._failed, self.unfetched = "", 0.0, 0, 0

    def fetched(self, problem: str | None, number: int = 0) -> None:
        """Note that a fetch has ended, perhaps with a problem, after which it is tried again
        later."""
        self.slots = ModelSlots(self.slots.folder)
        self.unfetched = 0 if problem is None else number
        self.trouble = problem or ""
        self._failed = 0 if problem is None else self._failed + 1
        self.fetch_at = time.monotonic() + min(_LONGEST_S, 15.0 * 2**self._failed)

    def hand_over(self, number: int, serving: Collection[str]) -> None:
        """Let a version run at the next start: on trial, if it serves these models then, unless it
        was accepted before, and was damaged."""
        if number == self.slots.serving:
            self.slots.accept(number)
            return
        write_json(self._served, {"models": sorted(serving)})
        self.slots.propose(number)

    def checked_in(self, serving: Collection[str], every_s: float) -> None:
        """Note that the server has answered this version, which serves these models."""
        if self.on_trial:
            before = (read_json(self._served) or {}).get("models", ())
            if missing := [each for each in before if each not in serving]:
                say(
                    f"version {self.number} of this program does not serve {', '.join(missing)} yet"
                )
                return
            self.slots.accept(self.number)
            self.on_trial = False
            say(f"version {self.number} of this program runs")
        elif self._doubted:
            if time.monotonic() - self._since < _CHECK_INS * every_s:
                told = (
                    "it did not check in, or did not serve the models, and its former version did"
                )
                self.slots.refuse(self._doubted, told)
            self._doubted = 0
