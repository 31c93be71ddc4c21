"""The job that runs functions of an app: submits it, and connects to its broker."""

import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from cavvy.capabilities.functions import payload
from cavvy.capabilities.functions.app import MAIN, App, Function, name_place
from cavvy.capabilities.functions.errors import AppBroken, NotSendable
from cavvy.capabilities.functions.meeting import dial_here, make_meeting_place
from cavvy.sdk.connections import Connections
from cavvy.sdk.errors import CavvyError, InvalidArgument
from cavvy.sdk.submission import SubmitOptions, submit_task
from cavvy.sdk.task import Task
from cavvy.spec.own_folder import explain_unfit

if TYPE_CHECKING:
    from cavvy.capabilities.functions.tunnel import Tunnel

ROOT = ".cavvy/functions"  # where the files lie in the working folder
SPEC, _CODE, _KEY = f"{ROOT}/app.json", f"{ROOT}/code.pkl", f"{ROOT}/key"
PROGRAMS = f"{ROOT}/cavvy/capabilities/functions/on_node"
_ON_NODES = (
    "__init__", "app", "calls", "capability", "errors", "frames", "image", "lengths", "limits",
    "link", "options", "payload", "spawned", "storage", "web",
)  # fmt: skip
_STATE = ("__init__", "asking", "objects")
_PACKAGE = Path(__file__).parents[2]  # of cavvy
_ALONE_S = 60.0  # after which the job of a program ends that is gone
_MOST_ENDED = 4
_TELL_S = 5.0  # after which the caller of a deployed app is told what it waits for
_LOOK_S = 0.25  # between two looks at the job
_DIAL_S = 0.004  # between two tries to connect on this machine
_HERE_S = 2.0  # after which a running job is not on this machine
_SIGNALS = (signal.SIGHUP, signal.SIGTERM)
ENDED = ("done", "failed", "stopped")


class JobPlace(NamedTuple):
    """A submitted job, and the path of the socket at which its callers on this machine meet it,
    with a colon and the key that both sides must know.
    """

    project: str
    id: str
    meet: str


class JobSource(Protocol):
    """Where the job of functions comes from: `OwnJob`, or the one of a deployed app."""

    name: str  # of the app
    stays: bool  # whether the job goes on when this program ends

    def find(self, connections: Connections) -> JobPlace:
        """Return the job; submit it, unless it waits or runs. Raises CavvyError."""
        ...


class OwnJob:
    """The job of an app's functions that need the same kind of node; `key` has what they need. It
    ends with this program.
    """

    stays = False

    def __init__(self, app: App, key: str, first: str) -> None:
        self.name = app.name
        self._app, self._key, self._first = app, key, first
        self._place: JobPlace | None = None

    def take(self, app: App) -> None:
        """Start the next job with the code of this app, which was loaded again."""
        self._app = app

    def find(self, connections: Connections) -> JobPlace:
        place = self._place
        if place is None or look_at(connections, place) in ENDED:
            meet = make_meeting_place(token_hex(8)) if place is None else place.meet
            task, files = make_task(self._app, self._key, [self._first], 0.0, meet=meet)
            options = SubmitOptions(
                project=self._app.project, files=files, consent=self._app.consent
            )
            with connections.use() as connection:
                made, _ = submit_task(connection, task, options, None, connections.default_project)
            self._place = place = JobPlace(made.project, made.id, meet)
        return place


class FunctionJob:
    """Connects to the broker in the job of functions."""

    def __init__(self, source: JobSource, *, quiet: bool = False) -> None:
        self._source, self._quiet = source, quiet
        self._connections = Connections(None, None, None)
        self._place: JobPlace | None = None
        self._tunnel: Tunnel | None = None
        # how many jobs may end before they take a call: none before this program had reached one,
        # since the setup or the app itself may fail
        self._left = 0

    def dial(self) -> socket.socket:
        """Return a connection to the broker. Start the job, unless it runs. Raises CavvyError."""
        with ended_by_signals():  # `stop` then ends a job whose caller is gone
            while True:
                place = self._place = self._source.find(self._connections)
                if (made := self._wait(place)) is not None:
                    self._left = _MOST_ENDED
                    return made

    def take(self, app: App) -> None:
        """Start the next job with the code of this app, unless the job is a deployed one."""
        if isinstance(self._source, OwnJob):
            self._source.take(app)

    def stop(self) -> None:
        """Stop the job, unless it stays."""
        if self._tunnel is not None:
            self._tunnel.close()
        if self._place is not None and not self._source.stays:
            with suppress(CavvyError), self._connections.use() as connection:
                ended = "the program has ended"
                connection.stop(self._place.project, self._place.id, reason=ended)
            with suppress(OSError):
                os.unlink(self._place.meet.rpartition(":")[0])
        self._connections.close()

    def _wait(self, place: JobPlace) -> socket.socket | None:
        """Wait until the broker answers. Return None if there must be another job: if this one has
        ended since no program had called it for long, or was lost.
        """
        looked = running_at = 0.0
        say = _say_nothing if self._quiet else _say
        told = WaitTeller(self._source.name, say, _TELL_S if self._source.stays else 0.0)
        while True:
            with suppress(OSError):
                return dial_here(place.meet)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                phase, reason = read_state(self._connections, place)
                idle = phase == "done" and self._source.stays
                if phase in ENDED and (idle or self._left > 0):
                    self._left -= 1
                    return None
                if phase in ENDED:
                    raise AppBroken(
                        f"the job of the app {self._source.name} has ended before it took a call:\n"
                        f"{self._read_log(place)}",
                        f"`cavvy status {place.id}` shows its events",
                    )
                if phase == "running":
                    running_at = running_at or now
                told.take(place, phase, reason)
            if running_at and now - running_at > _HERE_S:
                return self._dial_there(place)
            time.sleep(_DIAL_S)

    def find_cost(self, share_s: float) -> int | None:
        """Return what this share of the job's time costs in micro-dollars, at the mean price so
        far; None while there is no bill. Raises CavvyError."""
        place = self._place
        if place is None:
            return None
        with self._connections.use() as connection:
            charges = connection.cost(place.project, place.id).charges
        node = [each for each in charges if each.kind == "node"]
        seconds = sum((each.until - each.since).total_seconds() for each in node)
        amount = sum(each.amount_micros for each in node)
        return int(amount * min(share_s / seconds, 1.0)) if seconds > 0 else None

    def _dial_there(self, place: JobPlace) -> socket.socket:
        from cavvy.capabilities.functions.tunnel import Tunnel

        if self._tunnel is not None:
            self._tunnel.close()
        self._tunnel = Tunnel(self._connections, place.project, place.id)
        return self._tunnel.open()

    def _read_log(self, place: JobPlace) -> str:
        with suppress(CavvyError), self._connections.use() as connection:
            from cavvy.cli.view.job_output import EscapeFilter

            data = connection.log(place.project, place.id, tail_bytes=4000).data
            data = EscapeFilter().take(data, final=True)
            return "\n".join(f"  {line}" for line in data.decode(errors="replace").splitlines())
        return "  (no output)"


class WaitTeller:
    """Says on which phase a caller waits, and why a job is queued, when this changes. Jobs that
    start at once are told of nothing: the first look says nothing, and neither does any within
    `after_s`.
    """

    def __init__(self, name: str, say: Callable[[str], None], after_s: float = 0.0) -> None:
        self._name, self._say = name, say
        self._told: str | None = None
        self._from = time.monotonic() + after_s

    def take(self, place: JobPlace, phase: str, reason: str) -> None:
        if time.monotonic() < self._from:
            return
        text = ""
        if phase == "queued":
            text = f"queued, {reason}" if reason else f"queued; `cavvy status {place.id}` says why"
        elif phase != "running":
            text = phase
        if text and self._told not in (None, text):
            self._say(f"{self._name}: {text}")
        self._told = "" if self._told is None else text


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside the block, let signals that would kill this program end it as `sys.exit` does, so that
    what it has started ends with it. Handlers of the program itself stay.
    """
    numbers = []
    if threading.current_thread() is threading.main_thread():
        numbers = [each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    for each in numbers:
        signal.signal(each, _exit)
    try:
        yield
    finally:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)


class EndedBySignal(SystemExit):
    """Raised inside `ended_by_signals`."""


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise EndedBySignal(128 + number)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _say_nothing(text: str) -> None:
    pass


def read_state(connections: Connections, place: JobPlace) -> tuple[str, str]:
    """Return the job's phase and why it has it."""
    with connections.use() as connection:
        found = connection.job(place.project, place.id)
    return found.phase, found.reason


def look_at(connections: Connections, place: JobPlace) -> str:
    """Return the job's phase."""
    return read_state(connections, place)[0]


def group_functions(app: App) -> dict[str, list[Function]]:
    """Return the functions that share a job, by what they need."""
    found: dict[str, list[Function]] = {}
    for each in app.functions.values():
        found.setdefault(make_key(app, each), []).append(each)
    return found


def make_key(app: App, function: Function) -> str:
    """Return what a function's processes need, as text: functions with the same share a job."""
    options = function.options if function.owner is None else function.owner.options
    return json.dumps(options.to_keys(app.image), sort_keys=True, default=str)


def make_task(
    app: App,
    key: str,
    words: Sequence[str],
    idle_s: float,
    program: str = "serve",
    *,
    meet: str = "",
) -> tuple[Task, dict[str, Path]]:
    """Return the task of a job, and the files to send beside the app's folder. `words` are the
    arguments of the program behind the description of the app, and behind the path of the meeting
    place `meet`, whose key is sent as a file, which no list of processes shows. Raises NotSendable,
    InvalidArgument.
    """
    folder, _ = find_folder(app)
    files = {**list_runtime(), **describe_app(app, key, idle_s)}
    if meet:
        path, _, secret = meet.rpartition(":")
        words, files[_KEY] = [path, *words], keep_file(secret.encode(), "key")
    run = shlex.join(["exec", "python3", f"{PROGRAMS}/{program}.py", SPEC, *words])
    keys: dict[str, Any] = {**json.loads(key), "name": app.name, "tags": {"cavvy-app": app.name}}
    if folder is not None:
        keys["workdir"] = folder
    return Task(run, **keys), files


def describe_app(app: App, key: str, idle_s: float) -> dict[str, Path]:
    """Return the files that describe the functions of a job to its programs, and those with code
    that no file has. Raises NotSendable, InvalidArgument."""
    mine = group_functions(app)[key]
    _check_shared(app, mine)
    _, file = find_folder(app)
    values = _list_values(mine, by_file=bool(file))
    files: dict[str, Path] = {}
    if values:
        _check_version(app, values)
        files[_CODE] = keep_file(payload.dump_code(values, _name_values(values)), "pkl")
    spec = {
        "app": app.name,
        "module": app.place.module,
        "file": file,
        "code": _CODE if values else "",
        "python": ".".join(map(str, sys.version_info[:2])),
        "idle_s": idle_s,
        "alone_s": 0 if idle_s else _ALONE_S,
        "functions": {
            each.name: {
                "name": each.name,
                "class": each.owner.name if each.owner is not None else "",
                **each.options.to_head(each.name),
            }
            for each in mine
        },
    }
    files[SPEC] = keep_file(json.dumps(spec, sort_keys=True).encode(), "json")
    return files


def _check_shared(app: App, mine: Sequence[Function]) -> None:
    """Raise InvalidArgument if functions have a limit of one name that is not one limit: with other
    numbers, or in another job, whose calls are counted apart."""
    for name in {limit.name for each in mine for limit in each.options.limit if limit.name}:
        said: dict[tuple[str, int, object], str] = {}
        for each in app.functions.values():
            for limit in each.options.limit:
                if limit.name == name:
                    said[make_key(app, each), limit.count, limit.per] = each.name
        if len(said) > 1:
            first, second, *_ = said.values()
            raise InvalidArgument(
                f"{first} and {second} have a limit of the name {name!r}, which must be the same, "
                "and both must need the same image, resources, secrets and volumes",
                "give each a limit with a name of its own",
            )


def list_described(app: App, key: str) -> dict[str, bytes]:
    """Return the content of these files of a job that ends with this program."""
    return {path: file.read_bytes() for path, file in describe_app(app, key, 0.0).items()}


def list_runtime(root: str = ROOT) -> dict[str, Path]:
    """Return the files of Cavvy that functions need on a node, by their path in the working
    folder, below `root`: those of the broker and the workers, and what `import cavvy` needs there.
    """
    listed = [
        _PACKAGE / "__init__.py",
        *(_PACKAGE / "sdk" / f"{n}.py" for n in ("__init__", "errors")),
    ]
    listed += [_PACKAGE / "capabilities" / "__init__.py"]
    listed += sorted((_PACKAGE / "frame").glob("*.py"))
    listed += [Path(__file__).parent / f"{name}.py" for name in _ON_NODES]
    listed += sorted((Path(__file__).parent / "on_node").glob("*.py"))
    listed += [Path(__file__).parent / "state" / f"{name}.py" for name in _STATE]
    found = {f"{root}/cavvy/{each.relative_to(_PACKAGE).as_posix()}": each for each in listed}
    with suppress(ImportError):
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]

        own = Path(cloudpickle.__file__).parent
        found |= {f"{root}/cloudpickle/{each.name}": each for each in sorted(own.glob("*.py"))}
    return found


def find_folder(app: App) -> tuple[Path | None, str]:
    """Return the folder of the app's code, from which modules are imported, and the path of the
    app's file in it; None and "" for code without a file, as in notebooks.
    """
    if not app.place.file:
        return None, ""
    path = Path(app.place.file)
    depth = 0
    if app.place.module not in ("__main__", MAIN):
        depth = app.place.module.count(".") + (path.name == "__init__.py")
    if unfit := explain_unfit(path.parents[depth]):
        raise InvalidArgument(
            f"the folder of {path} is sent with the app {app.name}, but {unfit.partition(';')[0]}",
            "move the file into a folder of its own, with the modules that it imports",
        )
    return path.parents[depth], path.relative_to(path.parents[depth]).as_posix()


def _list_values(
    mine: list[Function], *, by_file: bool
) -> list[tuple[str, str, Any, dict[str, Any]]]:
    """Return the functions and classes whose code is sent as a value, since no module has it."""
    found: dict[str, tuple[str, str, Any, dict[str, Any]]] = {}
    for each in mine:
        raw = each.raw if each.owner is None else each.owner.raw
        if by_file and "<locals>" not in raw.__qualname__:  # type: ignore[union-attr]  # not looked up
            continue
        if each.owner is None:
            found[each.name] = ("function", each.name, raw, {})
        else:
            found[each.owner.name] = ("class", each.owner.name, raw, {})
    for _, name, raw, _ in found.values():
        _check_sendable(name, raw)
    return list(found.values())


def _check_version(app: App, values: list[tuple[str, str, Any, dict[str, Any]]]) -> None:
    """Raise NotSendable if the image has another Python than this one, which made the code."""
    own = ".".join(map(str, sys.version_info[:2]))
    for _, name, raw, _ in values:
        known = app.functions.get(name)
        options = app.classes[name].options if known is None else known.options
        version = options.choose_image(app.image).find_python()
        if version and f"{version}.".split(".")[:2] != own.split("."):
            raise NotSendable(
                f"{name} ({name_place(raw)}) is sent as code of Python {own}, since no file "
                f"defines it, and its image has Python {version}",
                f"write it into a file, or use an image with Python {own}",
            )


def _check_sendable(name: str, raw: Any) -> None:
    """Raise NotSendable if the function refers to an object that cannot be sent, with its name."""
    import inspect

    try:
        payload.dump_code(raw, name)
        return
    except NotSendable as error:
        reason = error
    parts = (
        [raw]
        if not isinstance(raw, type)
        else [each for each in vars(raw).values() if inspect.isfunction(each)]
    )
    for part in parts:
        used = inspect.getclosurevars(part)
        for kind, table in (("closes over", used.nonlocals), ("uses the global", used.globals)):
            for variable, value in table.items():
                try:
                    payload.dump_code(value, variable)
                except NotSendable:
                    line = _find_line(part, variable)
                    raise NotSendable(
                        f"{name} ({name_place(part)}) {kind} `{variable}`{line}, a "
                        f"{type(value).__name__}, which cannot be sent to another process",
                        f"make `{variable}` inside the function, or pass plain data instead",
                    ) from reason
    raise reason


def _find_line(raw: Any, variable: str) -> str:
    """Return in which line a function first uses a variable."""
    import dis

    line = None
    for step in dis.get_instructions(raw):
        line = (
            step.starts_line if isinstance(step.starts_line, int) and step.starts_line > 1 else line
        )
        if step.argval == variable and step.opname.startswith("LOAD") and line:
            return f" in line {line}"
    return ""


def _name_values(values: list[tuple[str, str, Any, dict[str, Any]]]) -> str:
    return "the code of " + ", ".join(name for _, name, _, _ in values)


def keep_file(data: bytes, ending: str) -> Path:
    """Return a file with this content in the cache of the state folder."""
    from cavvy.client.state import default_home

    folder = Path(default_home()) / "cache" / "functions"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{sha256(data).hexdigest()[:32]}.{ending}"
    if not path.exists():
        made = path.with_suffix(f".{token_hex(4)}")
        made.touch(0o600)
        made.write_bytes(data)
        made.replace(path)
    return path
