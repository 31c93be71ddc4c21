"""The main program of a device: keeps an engine for each model that the device serves, checks in
with the server, updates models, tries new versions, and goes back to the served version if one
fails. Without the server, it goes on serving.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

from cavvy.agent.work.confine import MODEL_PACKAGES, VARIABLES

from .documents import (
    MOST_MODELS,
    CheckIn,
    CloudService,
    Enrolment,
    ModelTold,
    PathsTold,
    PeersTold,
    SumsTold,
    TaskOutput,
    WantedVersion,
    read_answer,
    read_clouds,
    write,
)
from .front import CloudTarget, EdgeFront, EngineTarget
from .packages import this_target
from .peers import PEERS, PeerServer
from .program import AGAIN, PROGRAM, DeviceOptionInvalid, ProgramVersions
from .server_calls import (
    DeviceCalls,
    DeviceRefused,
    DeviceRequestInvalid,
    confine,
    environment,
    run_key,
)
from .settings import (
    SHARE,
    HeldSettings,
    ServerSettings,
    SettingRefused,
)
from .slots import ModelSlots, packages_of, plan_of, read_json, write_json
from .spool import MOST_SAMPLE, DriftWatch, make_sample, open_spool
from .tasks import kill_session, perform, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Fields = dict[str, Any]

_START_S = 120.0  # within which an engine must be ready
_PROBE_S = 5.0
_PORTS, _MOST_PORTS = (20_000, 32_000), 20  # of engines, and how many of them are looked at
_MOST_FAILED = 0.5  # of the requests to a version on trial; with more, it is refused at once
_CONFINED = '; if it needs more than its model (docker does), set "confined": false in edge.json'
_OWN_ENGINE = [sys.executable, "-m", "cavvy.model_server"]
# Failed requests below which a version on trial is not refused for them. Its trial goes on until it
# has had this number of requests.
_FEW = 4
_IDLE_S = 600.0  # without requests, after which a trial keeps one engine instead of two
_MOST_TASKS = 8  # of users, that are begun after a check-in
_MOST_BATCHES = 16  # of samples that are sent after a check-in
_LONGEST_S = 600.0  # between two tries of a fetch that fails, or of a device that is refused
_SKEW_S = 300.0  # by which the clock may be wrong without a word in the log


class ModelEngine:
    """The process that serves one version, and where requests reach it. The option `engine` is its
    command, in which {model}, {name} and {port} stand for the file, the model's name and the port,
    and {plan} for what `trtexec` has built of the file. It gets none of the rights of this program,
    whose folder is `folder`, unless the option `confined` says that another engine than Cavvy's
    needs them. `variables` are those that the server has set for engines."""

    def __init__(
        self,
        folder: str,
        name: str,
        number: int,
        path: str,
        options: Fields,
        variables: Mapping[str, str] = {},
    ) -> None:
        self.name, self.number = name, number
        self._folder, self._path, self._options = folder, os.path.abspath(path), options
        self._variables = variables
        self._start(free_port())
        self.target = EngineTarget(number, self._port)

    def _start(self, port: int) -> None:
        self._port, path, options = port, self._path, self._options
        values = {"model": path, "name": self.name, "port": str(port)}
        values["plan"] = plan_of(path)
        line = [each.format(**values) for each in options["engine"]]
        own, slot = line[:3] == _OWN_ENGINE, path.rpartition("/files/")[0]
        self.hint = "" if own or not options["confined"] else _CONFINED
        if shutil.which(line[0]) is None:
            raise FileNotFoundError(f"there is no program {line[0]}")
        plain, packages = line, packages_of(path)
        if own or options["confined"]:
            line = confine(self._folder, f"{slot}/files", line, "" if own else f"{slot}/work")
        if line is plain:
            environ = {**environment(packages), **self._variables}
        else:  # until it is confined, no module of a model may be on its path
            told = json.dumps(dict(self._variables), ensure_ascii=False)
            environ = {**environment(), VARIABLES: told, MODEL_PACKAGES: packages}
        self._process = subprocess.Popen(line, env=environ, stdin=subprocess.DEVNULL)

    @property
    def ended(self) -> bool:
        return not self.target.asleep and self._process.poll() is not None

    def sleep(self) -> None:
        """End the process, and keep requests until `wake`."""
        self.target.sleep()
        self.stop()

    def wake(self, over: threading.Event) -> None:
        """Start the process again. Raises OSError."""
        try:
            self._start(free_port())
            self.wait_ready(over)
        finally:
            self.target.wake(self._port)

    def replace(self, port: int) -> None:
        """End the engine, after requests that wait for it have gone to another port."""
        if self.target.asleep:
            self.target.wake(port)
        self.stop()

    def wait_ready(self, over: threading.Event) -> bool:
        """Wait until the engine answers that the model is ready. Return False if it does not in
        time, or if the program is over."""
        until = time.monotonic() + _START_S
        while time.monotonic() < until and self._process.poll() is None:
            if self.is_ready():
                return True
            if over.wait(0.05):
                break
        return False

    def is_ready(self) -> bool:
        import http.client

        line = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PROBE_S)
        try:
            line.request("GET", f"/v2/models/{self.name}/ready")
            return line.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            line.close()

    def stop(self) -> None:
        """End the engine after the requests that it is answering, at most some seconds later."""
        until = time.monotonic() + _PROBE_S
        while self.target.busy and time.monotonic() < until:
            time.sleep(0.05)
        self._process.terminate()
        try:
            self._process.wait(_PROBE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RunningModel:
    """One model on this device: its slots, the engine of the served version, and that of a version
    on trial. `probation_s` is the shortest length of a trial, in seconds. `trouble` says why the
    last fetch failed. `variables` are those that the server has set for engines."""

    def __init__(
        self,
        name: str,
        folder: str,
        front: EdgeFront,
        options: Fields,
        over: threading.Event,
        variables: Mapping[str, str] = {},
    ) -> None:
        self.name, self._folder, self._front, self._over = name, folder, front, over
        self.trouble, self.fetch_at, self.failed, self.unfetched = "", 0.0, 0, 0
        self._start_at, self._starts = 0.0, 0
        self.slots = ModelSlots(f"{folder}/models/{name}")
        self._options, self._variables = options, variables
        self._probation_s = float(options["probation_s"])
        self._served: ModelEngine | None = None
        self._tried: ModelEngine | None = None
        self._tried_since = 0.0
        self._is_quiet = False  # the trial goes on after its time, because of too few requests
        # the served version's target and its errors when the trial began
        self._before: tuple[EngineTarget | None, float] = None, 0.0

    def tell(self) -> ModelTold:
        """Return what the server is told about this model. While a version is on trial, the device
        serves that version. The server does not wait for the end of a trial without requests."""
        engine = self._tried or self._served
        return ModelTold(
            name=self.name,
            serving=self.slots.serving if engine is None else engine.number,
            refused=self.slots.refused,
            refused_in=self.slots.refused_in,
            problem=self.trouble or self.slots.problem,
            sums=None if engine is None else SumsTold(**engine.target.sums),
            on_trial=self._tried is not None and not self._is_quiet,
            unfetched=self.unfetched,
            paths=tell_counts(self._front, self.name),
        )

    def look(self) -> None:
        """Keep the served version running, and end a trial that is over."""
        self._wake_or_rest()
        if self._served is not None and self._served.target.is_stuck:
            say(f"{self.name}@{self._served.number} gives no answers; ending it")
            self._served.stop()
        if self._served is not None and self._served.ended:
            say(f"{self.name}@{self._served.number} ended; starting it again")
            self._served = None
        number, trial = self.slots.serving, self.slots.trial
        if self._served is None and number and time.monotonic() >= self._start_at:
            self._served = self._start(number)
        elif not number and trial and self._tried is None:
            self.try_version(trial)  # the first version, whose trial the end of the program cut
        if self._tried is not None:
            self._judge(self._tried)
        self._route()

    def _wake_or_rest(self) -> None:
        """While a trial waits for its first requests, end the served version's engine after a time,
        which frees its memory. Start it again once a request needs it, or the trial ends."""
        served, tried = self._served, self._tried
        if served is None:
            return
        if served.target.asleep:
            if served.target.wanted or tried is None or tried.ended:
                self._wake()
        elif tried is not None and self._is_quiet:
            asked_at = max(self._tried_since, tried.target.asked_at, served.target.asked_at)
            if time.monotonic() - asked_at >= _IDLE_S:
                say(f"{self.name}@{served.number} rests: there are no requests")
                served.sleep()

    def _wake(self) -> None:
        if self._served is not None and self._served.target.asleep:
            say(f"starting {self.name}@{self._served.number} again")
            try:
                self._served.wake(self._over)
            except OSError as error:
                say(f"the engine of {self.name}@{self._served.number} does not start: {error}")

    def _judge(self, tried: ModelEngine) -> None:
        sums = tried.target.sums
        wrong = self._count_wrong()
        failed, requests = sums["errors"] - wrong, sums["requests"] - wrong
        if tried.ended:
            self._give_up("its engine ended")
        elif failed >= _FEW and failed > _MOST_FAILED * requests:
            self._give_up(f"{failed:g} of {requests:g} requests failed")
        elif time.monotonic() - self._tried_since >= self._probation_s:
            if requests >= _FEW or self.is_first or not self._probation_s:
                self._accept(tried)
            elif not self._is_quiet:  # requests tell whether it works
                self.slots.propose(tried.number)  # no end of the device counts against it any more
                self._is_quiet = True
                say(f"{self.name}@{tried.number} stays on trial until {_FEW} requests have come")

    def _count_wrong(self) -> float:
        """Return how many requests the served version has failed too since the trial began."""
        target, errors = self._before
        same = self._served is not None and target is self._served.target
        return target.sums["errors"] - errors if target is not None and same else 0.0

    def want(self, number: int, rollout: int) -> bool:
        """Return whether a version has to be fetched or tried for a rollout."""
        tried = 0 if self._tried is None else self._tried.number
        if number == self.slots.serving and self.slots.find(number) is None:
            return True  # damaged
        if self.slots.is_refused(number, rollout):
            return False
        return number not in (self.slots.serving, tried)

    def note_wanted(self, number: int) -> None:
        """Forget why another version could not be fetched."""
        if self.unfetched not in (0, number):
            self.trouble, self.fetch_at, self.failed, self.unfetched = "", 0.0, 0, 0

    def fetched(self, problem: str | None, number: int = 0) -> None:
        """Note that a fetch has ended, perhaps with a problem, after which it is tried again
        later."""
        self.slots = ModelSlots(self.slots.folder)
        self.unfetched = 0 if problem is None else number
        self.trouble, self._start_at = problem or "", 0.0
        self.failed = 0 if problem is None else self.failed + 1
        self.fetch_at = time.monotonic() + min(_LONGEST_S, 15.0 * 2**self.failed)

    def try_version(self, number: int) -> None:
        """Start a version that is whole in the spare slot, on trial. A version that was served
        before, and was damaged, needs none."""
        path = self.slots.find(number)
        if number == self.slots.serving:
            self.slots.accept(number)
            return
        if path is None or not self.slots.begin_trial(number):
            return
        if self._tried is not None:
            self._tried.stop()
        served = None if self._served is None else self._served.target
        self._before = served, 0.0 if served is None else served.sums["errors"]
        self._is_quiet = False
        for last in (False, True):
            try:
                engine = self._make_engine(number, path)
            except OSError as error:
                self.slots.refuse(number, f"its engine does not start: {error}")
                return
            self._tried, self._tried_since = engine, time.monotonic()
            if engine.wait_ready(self._over):
                break
            if self._over.is_set():
                return
            if engine.ended and not last:  # another program may have taken its port
                continue
            told = "its engine ended" if engine.ended else "its engine was not ready in time"
            self._give_up(f"{told}{engine.hint}")
            return
        self._tried_since = time.monotonic()
        say(f"{self.name}@{number} is on trial for {self._probation_s:g} s")
        if not self.slots.serving and self._probation_s <= 0:
            self._accept(engine)
        self._route()

    @property
    def is_serving(self) -> bool:
        """Whether the accepted version runs."""
        return self._served is not None and not self._served.ended

    @property
    def is_first(self) -> bool:
        """Whether the version on trial is the only one that can serve."""
        return self._tried is not None and not self.slots.serving

    def return_to(self, number: int) -> None:
        """Go back to the served version, because the server wants another one than that on
        trial."""
        if self._tried is not None and self._tried.number != number:
            self._wake()
            tried, self._tried = self._tried, None
            self._route()
            say(f"{self.name}@{tried.number} was taken back")
            tried.stop()
            self.slots.end_trial()

    def set_probation(self, probation_s: float) -> None:
        """Let trials last so long, in seconds, also one that has begun."""
        self._probation_s = probation_s

    def renew(self, variables: Mapping[str, str]) -> bool:
        """Give the engines other variables: a new one of the served version takes the requests
        when it is ready. Return False if it does not get ready; the former one stays."""
        former, self._variables = self._variables, variables
        old = self._tried if self.is_first else self._served
        if old is not None:
            path = self.slots.find(old.number)
            fresh = None if path is None else self._start_beside(old.number, path)
            if fresh is None:
                self._variables = former
                return False
            if old is self._tried:
                self._tried = fresh
            else:
                self._served = fresh
            self._route()
            old.replace(fresh.target.port)
        if not self.is_first:
            self._interrupt_trial()
        return True

    def withdraw(self, variables: Mapping[str, str]) -> None:
        """Give the engines other variables although none gets ready with them: they are ended, and
        started again and again."""
        self._variables = variables
        served, self._served = self._served, None
        self._route()
        if served is not None:
            served.replace(served.target.port)
        self._interrupt_trial()

    def _interrupt_trial(self) -> None:
        """End the engine of a version on trial, whose trial begins anew at the next check-in."""
        tried, self._tried = self._tried, None
        if tried is not None:
            self._route()
            tried.stop()
            with suppress(OSError):  # a full disk must not leave a former secret to other engines
                self.slots.pause_trial()

    def _start_beside(self, number: int, path: str) -> ModelEngine | None:
        for _ in range(2):  # another program may have taken the first port
            try:
                engine = self._make_engine(number, path)
            except (OSError, ValueError):
                return None
            if engine.wait_ready(self._over):
                return engine
            ended = engine.ended
            engine.stop()
            if not ended or self._over.is_set():
                break
        return None

    def _make_engine(self, number: int, path: str) -> ModelEngine:
        return ModelEngine(self._folder, self.name, number, path, self._options, self._variables)

    def stop(self) -> None:
        for each in (self._served, self._tried):
            if each is not None:
                each.stop()
        if self._tried is not None:  # ended in good order: this is no failed trial
            with suppress(OSError):
                self.slots.pause_trial()

    def _start(self, number: int) -> ModelEngine | None:
        self._starts += 1
        self._start_at = time.monotonic() + min(60.0, 2.0**self._starts)
        path = self.slots.find(number)
        if path is None:
            say(f"{self.name}@{number} is damaged on the disk; it will be fetched again")
            self.slots.check(number)
            return None
        try:
            engine = self._make_engine(number, path)
        except OSError as error:
            say(f"the engine of {self.name}@{number} does not start: {error}")
            return None
        if engine.wait_ready(self._over):
            self._starts, self._start_at = 0, 0.0
        elif engine.ended and not self.slots.check(number):
            self._start_at = 0.0
            return None
        return engine

    def _accept(self, tried: ModelEngine) -> None:
        self.slots.accept(tried.number)
        old, self._served, self._tried = self._served, tried, None
        self._route()
        say(f"{self.name}@{tried.number} is served")
        if old is not None:
            old.stop()

    def _give_up(self, problem: str) -> None:
        self._wake()
        tried, self._tried = self._tried, None
        if tried is None:
            return
        self._route()
        say(f"{self.name}@{tried.number} is refused: {problem}")
        tried.stop()
        self.slots.refuse(tried.number, problem)

    def _route(self) -> None:
        engines = [each for each in (self._tried, self._served) if each is not None]
        targets = [each.target for each in engines if not each.ended]
        if targets:
            self._front.routes[self.name] = targets
        else:
            self._front.routes.pop(self.name, None)


def tell_counts(front: EdgeFront, model: str) -> PathsTold | None:
    """Return what the server is told about the requests for a model."""
    counted = front.counts.get(model)
    return None if counted is None else PathsTold(**counted.tell())


class DeviceProgram:
    """This device. `options` are the values of `edge.json` in the folder, or the defaults."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        card = read_json(f"{folder}/card.json")
        if card is None:
            raise DeviceOptionInvalid(
                f"{folder}/card.json is missing or damaged: run the line of `cavvy edge token`"
            )
        self._card, self._own = card, read_options(folder)
        self._settings = ServerSettings(folder, read_json(f"{folder}/edge.json") or {})
        self.options = {**self._own, **self._settings.options}
        self._calls = DeviceCalls(self._card, folder)
        self.front = _listen(str(self.options["listen"]), folder)
        # what other devices of the site take from this one, and by model where it may take it
        self._share: PeerServer | None = None
        try:
            self._share = self._open_share(str(self.options[SHARE]))
        except DeviceOptionInvalid as error:
            if SHARE not in self._settings.options:
                raise
            self._settings.trouble = _say_share(error)  # it serves also with wrong settings
        self._peers = PeersTold()
        self._over, self._began = threading.Event(), time.monotonic()
        self._program, self._again = ProgramVersions(folder), False
        self._skew_s, self._new_settings = 0.0, False
        self._models: dict[str, RunningModel] = {}
        for name in sorted(_list_folders(f"{folder}/models")):
            self._add(name)
        self._below: dict[str, float] = {}  # by model, the certainty below which samples are kept
        self._watches: dict[str, DriftWatch] = {}
        # by model, the service that answers what this device cannot; kept for when it is offline
        self._clouds: dict[str, CloudService] = {}
        self._use_clouds([])
        with suppress(ValueError):
            self._use_clouds(read_clouds(read_json(f"{folder}/clouds.json") or {}))
        self._spool = open_spool(f"{folder}/samples.db", int(self.options["spool_mib"]) << 20)
        self.front.keep = self._keep
        if self.options["cloud"]:
            self.front.cloud = CloudTarget(self.options["cloud"], str(self.options["cloud_key"]))

    def _open_share(self, address: str) -> PeerServer | None:
        """Raises DeviceOptionInvalid."""
        host, _, port = address.rpartition(":")
        if not address:
            return None
        try:
            return PeerServer((host, int(port)), self._find_file)
        except (OSError, OverflowError, ValueError) as error:
            raise _wrong_address(address, "share", self.folder, error) from error

    def _find_file(self, digest: str) -> str | None:
        """Return the path of a file of a whole version on this device, or None."""
        for slots in [self._program.slots, *(each.slots for each in list(self._models.values()))]:
            for slot in ("a", "b"):
                for each in (slots.manifest(slot) or {}).get("files", ()):
                    if each["sha256"] == digest:
                        return f"{slots.folder}/{slot}/files/{each['path']}"
        return None

    def _tell_share(self) -> str:
        """Return the address at which other devices of the site reach this one, or ""."""
        if self._share is None:
            return ""
        host, port = self._share.server_address[:2]
        if host == "0.0.0.0":
            server = urlsplit(str(self._card["address"]))
            with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((server.hostname or "", server.port or 443))  # sends nothing
                host = probe.getsockname()[0]
        return f"{host!s}:{port}"

    def _begin_share(self) -> None:
        if self._share is not None:
            threading.Thread(target=self._share.serve_forever, daemon=True).start()

    def leave(self, *signalled: object) -> None:
        self._over.set()

    def run(self) -> int:
        threading.Thread(target=self.front.serve_forever, daemon=True).start()
        self._begin_share()
        say(f"device {self._card['device']} listens on {self.options['listen']}")
        next_call = 0.0
        try:
            while not self._over.is_set():
                self._look()
                if time.monotonic() >= next_call:
                    next_call = time.monotonic() + self._check_in()
                self._over.wait(self.options["look_s"])
        finally:
            for each in self._models.values():
                each.stop()
            self.front.shutdown()
            if self._share is not None:
                self._share.shutdown()
            self._spool.close()
        return AGAIN if self._again else 0

    def _look(self) -> None:
        for each in list(self._models.values()):
            try:
                each.look()
            except OSError as error:  # a full disk must not end what is served
                say(f"{each.name}: {error}")

    def _check_in(self) -> float:
        """Report to the server, and begin what it wants. Return the seconds until the next time,
        with jitter, so that devices that start together do not call together."""
        every = float(self.options["every_s"])
        try:
            wanted = self._report()
        except DeviceRefused as error:
            say(f"{error}; models are still served")
            if error.retired:  # it keeps no key of a service, and no secret
                self._set_clouds([])
                if self._settings.held.secrets:
                    self._apply(self._settings.held.without_secrets())
            return max(every, min(10 * every, _LONGEST_S))
        except (OSError, ValueError, KeyError, TypeError) as error:
            say(f"the server was not reached, or its answer is wrong: {error}")
            return every * random.uniform(0.5, 1.5)
        try:
            self._follow_settings()
        except (OSError, ValueError, DeviceRefused) as error:
            say(f"the settings of the server were not fetched: {error}")
        try:
            self._program.checked_in(self._list_serving(), every)
            self._send_samples()
        except (OSError, ValueError, sqlite3.Error, DeviceRefused) as error:
            say(f"after the check-in: {error}")
        for each in wanted:
            try:
                self._follow(each)
            except (OSError, ValueError, KeyError, TypeError) as error:
                say(f"{each.name}@{each.number}: {error}")
        return every * random.uniform(0.8, 1.2)

    def _report(self) -> list[WantedVersion]:
        """Check in. Return what the server wants, a version of this program last: it ends this one.
        Raises OSError, ValueError, KeyError, TypeError, DeviceRefused."""
        free = shutil.disk_usage(self.folder).free >> 20
        models = [*self._program.tell(), *(each.tell() for each in self._models.values())]
        for name in sorted(self._clouds.keys() & self.front.counts.keys() - self._models.keys()):
            models.append(ModelTold(name=name, paths=tell_counts(self.front, name)))
        told = CheckIn(
            models=tuple(models[:MOST_MODELS]),
            free_mib=free,
            clock=time.time(),
            waiting=self._spool.waiting,
            agent="1",
            share=self._tell_share(),
            up_s=int(time.monotonic() - self._began),
            **self._settings.tell(),
        )
        answer = self._calls.call("POST", "/edge/v1/check-in", write(told))
        given = read_answer(answer, PROGRAM)
        for task in given.tasks[:_MOST_TASKS]:
            perform(task, self._card.get("allow_exec") is True, self._send_output)
        if given.clouds is not None and given.clouds != list(self._clouds.values()):
            self._set_clouds(given.clouds)
        self._new_settings = self._settings.want(given.settings)
        self._peers = given.peers
        if self._share is not None:
            self._share.take_key(self._peers.key)
        if given.now is not None:
            self._compare_clock(time.time() - given.now)
        return given.models if given.program is None else [*given.models, given.program]

    def _send_output(self, path: str, output: TaskOutput) -> None:
        calls = DeviceCalls(self._card, self.folder)  # another thread uses the other connection
        try:
            calls.call("POST", path, write(output))
        finally:
            calls.close()

    def _compare_clock(self, skew_s: float) -> None:
        if abs(skew_s) > _SKEW_S and abs(skew_s - self._skew_s) > _SKEW_S:
            where = "ahead of" if skew_s > 0 else "behind"
            say(
                f"the clock of this device is {abs(skew_s):.0f} s {where} the server's; models are "
                "served, but updates may fail or come in other hours until it is set"
            )
        self._skew_s = skew_s

    def _follow_settings(self) -> None:
        """Fetch and apply the server's settings, if it has others. Raises OSError,
        DeviceRefused."""
        if not self._new_settings:
            return
        self._new_settings = False
        told, held = None, self._settings.held
        answer = self._calls.call("GET", "/edge/v1/settings")
        try:
            told = json.loads(answer)
            fresh = HeldSettings(told)
        except (SettingRefused, RecursionError, ValueError) as error:
            left = held.without_withdrawn(told)
            if left is not held:
                self._apply(left)
            self._settings.refuse(self._settings.wanted, str(error))
            return
        if fresh.revision != self._settings.refused and fresh.tell() != held.tell():
            self._apply(fresh)

    def _apply(self, fresh: HeldSettings) -> None:
        """Use other settings. If an engine does not get ready with them, the former ones stay, but
        no secret that was taken back."""
        held, every_engine = self._settings.held, list(self._models.values())
        if fresh.environment != held.environment:
            taken_back = fresh.withdraws(held)
            if taken_back:  # a loss of power must not bring it back
                self._settings.keep(fresh)
            for place, each in enumerate(every_engine):
                if each.renew(fresh.environment):
                    continue
                told = f"the engine of {each.name} does not get ready with them"
                if not taken_back:
                    for other in every_engine[:place]:
                        other.renew(held.environment)
                    self._settings.refuse(fresh.revision, f"{told}; the former ones are used")
                    return
                each.withdraw(fresh.environment)
                self._settings.trouble = f"{told}, but a secret was taken back"
        trouble = self._settings.trouble if self._settings.held is fresh else ""
        if self._settings.held is not fresh:
            self._settings.keep(fresh)
        former, self.options = self.options, {**self._own, **self._settings.options}
        for each in every_engine:
            each.set_probation(float(self.options["probation_s"]))
        self._spool.limit(int(self.options["spool_mib"]) << 20)
        if self.options[SHARE] != former[SHARE]:
            trouble = self._move_share(str(self.options[SHARE])) or trouble
        self._settings.trouble = trouble
        say(f"settings {fresh.revision or '(none)'} of the server are used")

    def _move_share(self, address: str) -> str:
        """Give files at another address from now on. Return why that is not possible, or ""."""
        former, self._share = self._share, None
        if former is not None:
            former.shutdown()
            former.server_close()
        try:
            self._share = self._open_share(address)
        except DeviceOptionInvalid as error:
            return _say_share(error)
        self._begin_share()
        return ""

    def _set_clouds(self, clouds: list[CloudService]) -> None:
        self._use_clouds(clouds)
        try:
            write_json(f"{self.folder}/clouds.json", {"clouds": [write(each) for each in clouds]})
        except OSError as error:
            say(f"the services are not kept for the next start: {error}")

    def _use_clouds(self, clouds: list[CloudService]) -> None:
        """Let services answer what this device cannot, each for one model."""
        self._clouds, old = {each.model: each for each in clouds}, self.front.clouds
        fresh: dict[str, CloudTarget] = {}
        for name, each in self._clouds.items():
            known = old.get(name)
            same = known is not None and (known.url, known.key) == (each.url, each.key)
            fresh[name] = known if known and same else CloudTarget(each.url, each.key)
        self.front.clouds = fresh

    def _keep(self, model: str, number: int, request: bytes, answer: bytes) -> None:
        cloud = self._clouds.get(model)
        asked = [self._below.get(model), None if cloud is None else cloud.below]
        below = max((each for each in asked if each is not None), default=None)
        if below is None or len(request) + len(answer) > MOST_SAMPLE:
            return
        watch = self._watches.setdefault(model, DriftWatch())
        sample = make_sample(model, number, request, answer, watch)
        if sample is not None and (sample["why"] == "drift" or sample["certainty"] < below):
            self._spool.put(sample)

    def _send_samples(self) -> None:
        """Send what waits, but not without end: a device with many requests keeps new samples
        meanwhile."""
        for _ in range(_MOST_BATCHES):
            batch = self._spool.batch()
            if not batch or self._over.is_set():
                break
            self._look()
            try:
                self._calls.call("POST", "/edge/v1/samples", {"samples": batch})
            except DeviceRequestInvalid as error:
                say(f"{len(batch)} samples are dropped: {error}")
            self._spool.sent(batch[-1]["number"])

    def _list_serving(self) -> list[str]:
        return [name for name, each in self._models.items() if each.is_serving]

    def _follow_program(self, wanted: WantedVersion) -> None:
        """Fetch another version of this program, and end for it."""
        program, number = self._program, wanted.number
        program.note_wanted(number)
        if not program.want(number, wanted.rollout) or not _is_open(wanted):
            return
        if wanted.wait and program.slots.find(number) is None:
            return
        program.slots.note_rollout(wanted.rollout)
        if program.slots.find(number) is None and (
            time.monotonic() < program.fetch_at or not self._fetch(PROGRAM, number, wanted)
        ):
            return
        program.hand_over(number, self._list_serving())
        self._again = True
        self._over.set()

    def _follow(self, wanted: WantedVersion) -> None:
        name, number = wanted.name, wanted.number
        if name == PROGRAM:
            self._follow_program(wanted)
            return
        if wanted.collect_below is None:
            self._below.pop(name, None)
        else:
            self._below[name] = wanted.collect_below
        model = self._models.get(name) or self._add(name)
        model.note_wanted(number)
        if model.is_first:
            return  # it serves until its trial has ended, also if the server wants another by now
        if number == model.slots.serving:
            model.return_to(number)
        if not model.want(number, wanted.rollout) or not _is_open(wanted):
            return
        if wanted.wait and model.slots.find(number) is None:
            return  # another device of the site fetches it, and gives it to this one
        model.return_to(number)  # its slot is needed
        model.slots.note_rollout(wanted.rollout)
        if model.slots.find(number) is None and (
            time.monotonic() < model.fetch_at or not self._fetch(name, number, wanted)
        ):
            return
        model.try_version(number)

    def _fetch(self, name: str, number: int, wanted: WantedVersion) -> bool:
        command = [sys.executable, "-m", f"{__package__}.update", self.folder, name, str(number)]
        if wanted.mib_per_s:
            command.append(str(wanted.mib_per_s))
        say(f"fetching {name}@{number}")
        told = json.dumps({"at": self._peers.at.get(name, []), "key": self._peers.key})
        environ = {**environment(), PEERS: told}  # others may read arguments, and there is a key
        # `trtexec`, which it may have started, ends with it
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, env=environ, start_new_session=True
        )
        words = _LastWords(process.stderr)
        next_call = time.monotonic() + self.options["every_s"]
        while process.poll() is None:
            self._look()
            stop = self._over.wait(self.options["look_s"]) or not _is_open(wanted)
            if time.monotonic() >= next_call:
                next_call = time.monotonic() + self.options["every_s"]
                stop = stop or self._is_taken_back(name, number)
            if stop:
                kill_session(process)
                process.wait()
                words.read()
                return False
        told = words.read()
        model = self._program if name == PROGRAM else self._models[name]
        problem = f"{name}@{number} was not fetched: {told}" if process.returncode else None
        if problem or told:
            say(problem or told)
        model.fetched(problem, number)
        if process.returncode == 3:
            model.trouble, model.unfetched = "", 0
            model.slots.refuse(number, told)
        return not process.returncode

    def _is_taken_back(self, name: str, number: int) -> bool:
        """Check in during a fetch. Return whether the server wants another version by now."""
        try:
            wanted = self._report()
            self._follow_settings()  # a secret is taken back also during a long fetch
        except (OSError, ValueError, KeyError, TypeError, DeviceRefused):
            return False
        return (name, number) not in [(each.name, each.number) for each in wanted]

    def _add(self, name: str) -> RunningModel:
        variables = self._settings.held.environment
        made = RunningModel(name, self.folder, self.front, self.options, self._over, variables)
        self._models[name] = made
        return made


class _LastWords:
    """Reads what a process writes, because it would wait for ever with a full pipe, and keeps the
    end."""

    def __init__(self, pipe: Any) -> None:
        self._pipe, self._kept = pipe, b""
        self._reader = threading.Thread(target=self._work, daemon=True)
        self._reader.start()

    def read(self) -> str:
        """Return the end of what the process wrote, after it has ended."""
        self._reader.join(_PROBE_S)
        return self._kept.decode(errors="replace").strip()[-300:]

    def _work(self) -> None:
        with self._pipe:
            while piece := self._pipe.read1(1 << 12):
                self._kept = (self._kept + piece)[-1200:]


def make_defaults() -> Fields:
    """Return the options of a device. `engine` is the command of the engine."""
    engine = [*_OWN_ENGINE, "--with-parent", "--model", "{model}"]
    return {
        "listen": "127.0.0.1:8080",
        "engine": [*engine, "--name", "{name}", "--port", "{port}"],
        "trtexec": "",
        "confined": True,
        "probation_s": 60.0,
        "every_s": 60.0,
        "look_s": 1.0,
        "spool_mib": 64,
        "share": "",
        "cloud": "",
        "cloud_key": "",
        "managed": True,
    }


def read_options(folder: str) -> Fields:
    """Return the defaults, replaced by what `edge.json` states. Raises DeviceOptionInvalid."""
    path, defaults = f"{folder}/edge.json", make_defaults()
    try:
        with open(path, encoding="utf-8") as file:
            stated = json.load(file)
    except FileNotFoundError:
        return defaults
    except (OSError, ValueError) as error:
        raise DeviceOptionInvalid(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(stated, dict):
        raise DeviceOptionInvalid(f'{path} must be a table, such as {{"every_s": 60}}')
    if unknown := sorted(stated.keys() - defaults):
        known = ", ".join(defaults)
        raise DeviceOptionInvalid(f"{path}: there is no option {unknown[0]!r}; known: {known}")
    for name, value in stated.items():
        if expected := _check_option(name, value, defaults[name]):
            raise DeviceOptionInvalid(f"{path}: `{name}` is {value!r}; expected {expected}")
    return {**defaults, **stated}


def _check_option(name: str, value: Any, default: Any) -> str:
    """Return what was expected in place of a wrong option, or ""."""
    if isinstance(default, list):
        texts = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
        with suppress(LookupError, ValueError):
            if texts and [each.format(model="", name="", port="", plan="") for each in value]:
                return ""
        return "a list of texts, in which only {model}, {name}, {port} and {plan} have braces"
    if isinstance(default, str | bool):
        expected = "a text" if isinstance(default, str) else "true or false"
        return "" if isinstance(value, type(default)) else expected
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    least = 0.0 if name == "probation_s" else 0.01
    if not number or not math.isfinite(value) or not least <= value <= 1e6:
        return f"a number from {least:g} to 1,000,000"
    return ""


def _listen(address: str, folder: str) -> EdgeFront:
    """Raises DeviceOptionInvalid."""
    host, _, port = address.rpartition(":")
    try:
        return EdgeFront((host, int(port)))
    except (OSError, OverflowError, ValueError) as error:
        raise _wrong_address(address, "listen", folder, error) from error


def _say_share(error: Exception) -> str:
    return f"other devices get no files: `share` cannot be opened ({error.__cause__})"


def _wrong_address(address: str, option: str, folder: str, error: Exception) -> Exception:
    reason = getattr(error, "strerror", None) or "expected HOST:PORT"
    return DeviceOptionInvalid(
        f"{address!r}, which `{option}` in {folder}/edge.json sets: {reason}"
    )


def enrol(folder: str, address: str, pin: str, token: str) -> Fields:
    """Make the device's key, and enrol the device. A repeated call changes nothing, unless the
    server has moved. Raises OSError, DeviceRefused."""
    known = read_json(f"{folder}/card.json")
    if known is not None and (known.get("address"), known.get("pin")) == (address, pin):
        return known
    card = {"address": address, "pin": pin}
    key, facts = run_key(folder, "make"), find_facts()
    asked = write(Enrolment(key=key, hostname=socket.gethostname(), facts=facts))
    try:
        card.update(DeviceCalls(card, folder).ask("POST", "/edge/v1/enrol", asked, token))
    except (OSError, DeviceRefused) as error:
        if known is None:
            raise
        say(f"{address} does not take this device, which stays with {known['address']}: {error}")
        return known
    write_json(f"{folder}/card.json", card)
    return card


def find_facts() -> dict[str, str]:
    """Return what this device tells about its hardware."""
    machine = os.uname()
    facts = {"machine": machine.machine, "system": f"{machine.sysname} {machine.release}"}
    facts["cpus"] = str(os.cpu_count() or 1)
    facts["python"] = this_target()
    for name, path in {
        "board": "/proc/device-tree/model",
        "jetson": "/etc/nv_tegra_release",
    }.items():
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                facts[name] = file.readline().strip("\x00\n")
        except OSError:
            continue
    for name, path in {"hailo": "/dev/hailo0", "coral": "/dev/apex_0"}.items():
        if os.path.exists(path):
            facts[name] = path
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            facts["memory_mib"] = str(int(file.readline().split()[1]) >> 10)
    except (OSError, ValueError, IndexError):
        pass
    return facts


def free_port() -> int:
    """Return a port for an engine, which binds it some time later: preferably one of those that
    systems give to no connection by themselves."""
    for _ in range(_MOST_PORTS):
        port = random.randrange(*_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_open(wanted: WantedVersion) -> bool:
    """Return whether the device may update in this hour of its day."""
    hour = time.localtime().tm_hour
    for window in (wanted.window, wanted.site_window):
        first, last = (window[0], window[-1]) if window else (0, 24)
        if not (first <= hour < last if first <= last else hour >= first or hour < last):
            return False
    return True


def _list_folders(path: str) -> list[str]:
    try:
        return [each.name for each in os.scandir(path) if each.is_dir()]
    except OSError:
        return []


def run(folder: str) -> int:
    """Run an enrolled device until it gets SIGTERM or SIGINT. Return the exit code."""
    try:
        device = DeviceProgram(folder)
    except DeviceOptionInvalid as error:
        say(f"not started: {error}; correct this, and run {folder}/start")
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, device.leave)
    return device.run()
