"""Sandboxes as programs use them: `cavvy.Sandbox`.

What comes out of a sandbox is data: it is never executed or unpickled here.
"""

import asyncio
import builtins
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from cavvy.capabilities.functions.app import BothWays
from cavvy.capabilities.functions.jobs import JobPlace
from cavvy.capabilities.sandboxes import trees
from cavvy.capabilities.sandboxes.errors import (
    SandboxEnded,
    SandboxError,
    SandboxFileError,
    SandboxNotFound,
)
from cavvy.capabilities.sandboxes.hosts import SandboxHosts
from cavvy.capabilities.sandboxes.link import SandboxLink
from cavvy.capabilities.sandboxes.options import check_variables, make_options
from cavvy.capabilities.sandboxes.program import SandboxProcess
from cavvy.sdk.errors import CavvyError, InvalidArgument

_MOST_READ = 1 << 30  # bytes of a file that `read_file` returns
_MOST_ERROR = 64 << 10
_lock = threading.Lock()
_hosts: list[SandboxHosts] = []


class SandboxInfo(NamedTuple):
    """What is known of a sandbox. `state` is running or ended; `why` says why it ended: terminated,
    timeout, memory, lost or isolation. `seconds` is how long it has lived.
    """

    id: str
    title: str
    tags: Mapping[str, str]
    state: str
    why: str
    seconds: float
    left_s: float
    programs: int
    cpu: float
    memory_mib: int
    network: bool | builtins.list[str]


class SandboxFile(NamedTuple):
    """A file in a folder of a sandbox: `kind` is file, folder, link, pipe, socket or device."""

    name: str
    kind: str
    size: int


class _ClassCall:
    """A method of `Sandbox` that needs no sandbox; it is called on the class."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self.__doc__ = name, text

    def __get__(self, owner: object, kind: type) -> BothWays[..., Any]:
        return _both(getattr(kind, self._name))


class Sandbox:
    """A place to run untrusted code. It ends after its `timeout`, when it is terminated,
    or with its host. As a context manager, it is terminated at the end.
    """

    create = _ClassCall(
        "_create",
        """Return a new sandbox. Its options:

        `image` is its software, such as `cavvy.Image.python().pip_install("numpy")`; `cpu`,
        `memory` ("2GB"), `disk` ("1GB", in memory) and `processes` (256) are its limits; after
        `timeout` ("5m") it ends, also if its server and its caller are gone. `network` is
        False, True, or a list of host names ("*.example.com"): a proxy for HTTP and HTTPS, which
        refuses addresses that are not of the internet.
        `dicts` and `queues` are the names of those that its programs may use, by
        `cavvy.Dict(NAME, trust=False)`, without a network, too; by default none.
        `isolation="required"` refuses machines that lack any wall. `env` are variables of its
        programs; `title` and `tags` are shown in lists. `snapshot` has the files with which its
        home folder begins.

        Sandboxes run in a job of the project, which is submitted if none runs that has the same
        `image` and `resources` (keys of a task's resources); it ends when it had no sandbox for
        `idle` ("1m"). `consent` agrees to what it costs; with `free`, no consent counts,
        so only what costs nothing is used. Raises CavvyError.
        """,
    )
    from_id = _ClassCall("_from_id", "Return the sandbox with this ID. Raises SandboxNotFound.")
    list = _ClassCall("_list", "Return a SandboxInfo of each sandbox; with `ended`, of ended ones.")

    def __init__(self, link: SandboxLink, place: JobPlace, name: str) -> None:
        self._first, self._place, self._name = link, place, name

    @property
    def id(self) -> str:
        """The sandbox's ID, for `Sandbox.from_id`."""
        return f"sb-{self._place.id}-{self._name}"

    @classmethod
    def _create(
        cls,
        *,
        project: str | None = None,
        snapshot: "SandboxSnapshot | None" = None,
        **keys: Any,
    ) -> Self:
        options = make_options(keys)
        wire, needs = options.to_wire(), options.to_needs()
        for left in (1, 0):
            link, place = _find_hosts().find(project, needs)
            try:
                answer = link.ask("create", options=wire)
                break
            except CavvyError:
                if not link.lost or not left:  # an idle host may have just ended
                    raise
        made = cls(link, place, str(answer["name"]))
        if snapshot is not None:
            try:
                made._unpack(snapshot)
            except BaseException:
                made.terminate()
                raise
        return made

    @staticmethod
    def _from_id(id: str, *, project: str | None = None) -> "Sandbox":
        job, name = _read_id(id)
        link, place = _find_hosts().reach(project, job)
        link.ask("describe", sandbox=name)
        return Sandbox(link, place, name)

    @staticmethod
    def _list(*, project: str | None = None, ended: bool = False) -> "builtins.list[SandboxInfo]":
        found = []
        for job in _find_hosts().list_jobs(project):
            try:
                link, place = _find_hosts().reach(project, job)
                answer = link.ask("list")
            except SandboxError:
                continue  # it ends just now
            found += [_read_info(place, each) for each in answer["sandboxes"]]
        return [each for each in found if ended or each.state == "running"]

    @property
    def exec(self) -> BothWays[..., SandboxProcess]:
        """Start a program: `exec("python", "-c", code)`. `workdir` is its folder (by default the
        sandbox's home folder), `env` its variables besides the sandbox's, and with `text=False` its
        outputs are bytes. After `timeout` seconds it is killed. Raises SandboxEnded.
        """
        return _both(self._exec)

    @property
    def write_file(self) -> BothWays[..., None]:
        """Write a file: `write_file(path, data)` with text or bytes. Folders above it are made. A
        relative path is in the sandbox's home folder. Raises SandboxFileError.
        """
        return _both(self._write_file)

    @property
    def read_file(self) -> BothWays[..., bytes]:
        """Return what is in a file, as bytes. Raises SandboxFileError."""
        return _both(self._read_file)

    @property
    def ls(self) -> "BothWays[..., builtins.list[SandboxFile]]":
        """List a folder. Raises SandboxFileError."""
        return _both(self._ls)

    @property
    def mkdir(self) -> BothWays[..., None]:
        """Make a folder, with those above it. Raises SandboxFileError."""
        return _both(partial(self._change, "make_folder"))

    @property
    def rm(self) -> BothWays[..., None]:
        """Remove a file, or a folder with its files. Raises SandboxFileError."""
        return _both(partial(self._change, "remove"))

    @property
    def put(self) -> BothWays[..., None]:
        """Copy a file or folder of this computer into the sandbox: `put(local, path)`. Links are
        left out. Raises SandboxFileError, OSError.
        """
        return _both(self._put)

    @property
    def get(self) -> BothWays[..., int]:
        """Copy a file or folder of the sandbox to this computer: `get(path, local)`. Returns how
        many links, pipes and devices were left out. Files are made anew below `local`, never
        through links. In a folder with files of yours, nothing is made or replaced without
        `replace=True`. More than twice the sandbox's `disk` is refused. Raises SandboxFileError,
        OSError.
        """
        return _both(self._get)

    @property
    def snapshot(self) -> "BothWays[..., SandboxSnapshot]":
        """Keep the files of the sandbox's home folder, for `Sandbox.create(snapshot=...)`. They
        are kept in the cache of this computer. Raises SandboxFileError.
        """
        return _both(self._snapshot)

    @property
    def forward(self) -> "BothWays[..., int]":
        """Return a port of this computer (127.0.0.1) through which a port of the sandbox is
        reached, as long as this program runs.
        """
        return _both(self._forward)

    @property
    def info(self) -> BothWays[..., SandboxInfo]:
        """Return what is known of the sandbox. Raises SandboxNotFound."""
        return _both(self._info)

    @property
    def wait(self) -> BothWays[..., str]:
        """Wait until the sandbox has ended, and return why."""
        return _both(self._wait)

    @property
    def terminate(self) -> BothWays[..., None]:
        """End the sandbox, with its programs and files. Nothing happens if it has ended."""
        return _both(self._terminate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.terminate.aio()

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}>"

    @property
    def _link(self) -> SandboxLink:
        """The connection to the host. A lost one is opened again. Raises SandboxNotFound."""
        if self._first.lost:
            self._first, _ = _find_hosts().reach(self._place.project, self._place.id)
        return self._first

    def _exec(
        self,
        *argv: str,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        text: bool = True,
        timeout: float | None = None,
    ) -> SandboxProcess:
        if not argv or not all(isinstance(each, str) and "\0" not in each for each in argv):
            raise InvalidArgument(
                f"exec: {argv!r:.200} is no command", 'pass its words, such as exec("ls", "-l")'
            )
        fields: dict[str, Any] = {"argv": list(argv), "cwd": workdir}
        fields["env"] = check_variables("env", env or {})
        stream, _ = self._link.open("start", sandbox=self._name, **fields)
        return SandboxProcess(self._link, stream, argv, text=text, timeout=timeout)

    def _call(self, name: str, data: bytes | Iterator[bytes] = b"", **fields: Any) -> "_FileCall":
        call = {"name": name, **fields}
        stream, _ = self._link.open("start", sandbox=self._name, call=call)
        return _FileCall(SandboxProcess(self._link, stream, (name,), text=False), data)

    def _write_file(self, path: str | os.PathLike[str], data: str | bytes) -> None:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        self._call("write", raw, path=_read_path(path)).finish()

    def _read_file(self, path: str | os.PathLike[str]) -> bytes:
        return self._call("read", path=_read_path(path)).finish(_MOST_READ)

    def _ls(self, path: str | os.PathLike[str] = ".") -> "builtins.list[SandboxFile]":
        found = json.loads(self._call("list", path=_read_path(path)).finish(_MOST_READ))
        return sorted(
            SandboxFile(os.fsdecode(bytes.fromhex(name)), str(kind), int(size))
            for name, kind, size in found
        )

    def _change(self, name: str, path: str | os.PathLike[str]) -> None:
        self._call(name, path=_read_path(path)).finish()

    def _put(self, local: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
        source = Path(local)
        if source.is_dir():
            self._call("take_tree", trees.send_tree(source), path=_read_path(path)).finish()
            return
        with source.open("rb") as file:
            pieces = iter(lambda: file.read(trees.PIECE), b"")
            mode = source.stat().st_mode & 0o777
            self._call("write", pieces, path=_read_path(path), mode=mode).finish()

    def _get(
        self,
        path: str | os.PathLike[str],
        local: str | os.PathLike[str],
        *,
        replace: bool = False,
    ) -> int:
        take = partial(
            trees.take_tree, local=Path(local), disk_mib=self._read_disk(), replace=replace
        )
        left_out: int = self._call("send_tree", path=_read_path(path)).run(take)
        return left_out

    def _snapshot(self) -> "SandboxSnapshot":
        keep = partial(SandboxSnapshot.keep, disk_mib=self._read_disk())
        made: SandboxSnapshot = self._call("pack", path=".").run(keep)
        return made

    def _read_disk(self) -> int:
        return int(self._link.ask("describe", sandbox=self._name)["disk_mib"])

    def _unpack(self, snapshot: "SandboxSnapshot") -> None:
        if not isinstance(snapshot, SandboxSnapshot):
            raise InvalidArgument(f"snapshot={snapshot!r:.200}", "pass what `snapshot()` returned")
        self._call("unpack", snapshot.read(), path=".").finish()

    def _forward(self, port: int, *, local_port: int = 0) -> int:
        from cavvy.capabilities.sandboxes.ports import PortForward

        return PortForward(self._link, self._name, port, local_port).port

    def _info(self) -> SandboxInfo:
        return _read_info(self._place, self._link.ask("describe", sandbox=self._name))

    def _wait(self, timeout: float | None = None) -> str:
        try:
            return str(self._link.ask("wait", timeout, sandbox=self._name)["why"])
        except TimeoutError:
            return ""

    def _terminate(self) -> None:
        with suppress(SandboxNotFound):
            self._link.ask("terminate", sandbox=self._name)


class SandboxSnapshot:
    """The files of a sandbox's home folder at one time. Only sandboxes read what is in it."""

    def __init__(self, id: str) -> None:
        if len(id) != 64 or set(id) - set("0123456789abcdef"):
            raise InvalidArgument(f"snapshot: {id!r:.200} is no ID", "pass a snapshot's `id`")
        self.id = id

    @classmethod
    def keep(cls, pieces: Iterator[bytes], *, disk_mib: int) -> "SandboxSnapshot":
        """Keep an archive that arrives, of a sandbox with this disk."""
        return cls(trees.keep_snapshot(pieces, disk_mib))

    def read(self) -> Iterator[bytes]:
        """Yield the archive. Raises SandboxFileError if it is not on this computer."""
        return trees.read_snapshot(self.id)

    def __repr__(self) -> str:
        return f"<SandboxSnapshot {self.id[:12]}>"


class _FileCall:
    """A call that reads or writes files of a sandbox."""

    def __init__(self, process: SandboxProcess, data: bytes | Iterator[bytes]) -> None:
        self._process = process
        self._sender = threading.Thread(target=self._send, args=(data,), daemon=True)
        self._error: BaseException | None = None
        self._sender.start()

    def finish(self, most: int = _MOST_ERROR) -> bytes:
        """Return what arrives. Raises SandboxFileError."""
        found: bytes = self.run(partial(_join, most=most))
        return found

    def run(self, take: Callable[[Iterator[bytes]], Any]) -> Any:
        """Return what `take` makes of what arrives. Raises SandboxFileError, what `take` raises."""
        try:
            found, error = take(self._process.read_pieces()), None
        except (CavvyError, OSError) as caught:
            found, error = None, caught
        if error is not None:
            self._process.kill()
        code = self._process.wait()
        self._sender.join()
        text = self._process.read_error(_MOST_ERROR)
        why = self._process.why
        if self._error is not None and not why:
            raise self._error
        if error is not None and not why and code in (0, -signal.SIGKILL):
            raise error
        if code:
            raise _read_error(code, text, why)
        return found

    def _send(self, data: bytes | Iterator[bytes]) -> None:
        try:
            for each in (data,) if isinstance(data, bytes) else data:
                if not self._process.write_bytes(each):
                    return
            self._process.write_bytes(b"", last=True)
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            self._error = error
            self._process.kill()


def _both(call: Callable[..., Any]) -> BothWays[..., Any]:
    return BothWays(call, partial(asyncio.to_thread, call))


def _find_hosts() -> SandboxHosts:
    with _lock:
        if not _hosts:
            _hosts.append(SandboxHosts())
        return _hosts[0]


def _read_id(id: str) -> tuple[str, str]:
    parts = id.split("-") if isinstance(id, str) else []
    if len(parts) < 3 or parts[0] != "sb":
        raise InvalidArgument(f"{id!r:.200} is no ID of a sandbox", "they look like sb-JOB-NAME")
    return "-".join(parts[1:-1]), parts[-1]


def _read_info(place: JobPlace, told: Mapping[str, Any]) -> SandboxInfo:
    return SandboxInfo(
        id=f"sb-{place.id}-{told['name']}",
        **{name: told[name] for name in SandboxInfo._fields if name != "id"},
    )


def _read_path(path: str | os.PathLike[str]) -> str:
    found = os.fspath(path)
    if not isinstance(found, str) or not found or "\0" in found:
        raise InvalidArgument(f"{found!r:.200} is no path", "pass a text without zero bytes")
    return found


def _join(pieces: Iterator[bytes], *, most: int) -> bytes:
    found, size = [], 0
    for each in pieces:
        found.append(each)
        size += len(each)
        if size > most:
            raise SandboxFileError(f"there are more than {most >> 20} MiB: use `get`")
    return b"".join(found)


def _read_error(code: int, text: bytes, why: str) -> CavvyError:
    if code == -signal.SIGKILL:
        return SandboxEnded(f"the sandbox ended meanwhile ({why or 'killed'})")
    try:
        told = json.loads(text)
        path, said, number = str(told["path"]), str(told["text"]), int(told["errno"])
    except (ValueError, KeyError, TypeError):
        return SandboxFileError(f"the files cannot be read or written: {text[:500]!r}")
    shown = f"{path[:500]!r}: " if path else ""
    return SandboxFileError(f"{shown}{said[:500]}", number)
