"""Remembers which replica has made a response of OpenAI's Responses API, and so holds it.

Engines keep responses in the memory of one replica. A request that continues a response
(`previous_response_id`), or reads, cancels or deletes it, is therefore sent to this replica. The
gateway knows the responses that it has passed on, also before a restart: each is a line of a file.
If it does not know one, because another gateway has passed it on, it asks the replicas. If none has
it, any replica gets the request, and the engine says that it has no such response.

A response belongs to the key with which it was made. If a service has several keys, a gateway that
does not know whose a response is treats it as another's.
"""

import asyncio
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path
from stat import S_ISREG

from cavvy.capabilities.language_models.engine_calls import EngineCallError, call_engine
from cavvy.capabilities.serving.gateway.config import ReplicaAddress
from cavvy.capabilities.serving.gateway.rates import make_plain

_log = logging.getLogger(__name__)

UNREADABLE = "unreadable"  # instead of the ID in a body that the gateway cannot read
_KNOWN_MAX = 20_000  # responses of a service; the oldest are forgotten
_FILE_MAX = 16 << 20  # bytes of the file that are read
# a line whose end is missing was cut off by a kill
_LINE = re.compile(rb"(?m)^(resp_[\w.-]{1,128}) ([!-~]{1,256})(?: @([!-~]{1,256}))?\n")
_NAME = re.compile(r"(?a:resp_[\w.-]{1,128})")
_ASK_S, _ASKED_MAX = 2.0, 64  # replicas that are asked for a response, and the time they have
_BEGIN = 4096  # bytes of an answer in which its ID is looked for
_ID = re.compile(rb'"id"\s{0,8}:\s{0,8}"(resp_[\w.-]{1,128})"')
_ID_LONGEST = 160  # bytes of a match
# further segments after the ID are `cancel` and `input_items`
PATH = re.compile(rb"/v1/responses/(?!(?:compact|input_tokens)(?:/|\?|$))([^/?]+)(?:/\w+)?/?")


def read_response_id(target: bytes) -> str:
    """Return the ID of the response that a target names, or "" if it names none."""
    found = PATH.match(make_plain(target))
    return found[1].decode("latin-1") if found else ""


async def find_holder(addresses: Iterable[ReplicaAddress], response_id: str) -> str | None:
    """Ask replicas for a response, and return the ID of one that has it, or None."""
    if not _NAME.fullmatch(response_id):
        return None

    async def has_it(address: ReplicaAddress) -> str | None:
        async with asyncio.timeout(_ASK_S):
            answer = await call_engine(address, "GET", f"/v1/responses/{response_id}", most=0)
        return address.id if answer.status == 200 else None

    asked = [asyncio.ensure_future(has_it(each)) for each in islice(addresses, _ASKED_MAX)]
    try:
        for each in asyncio.as_completed(asked):
            with suppress(EngineCallError, OSError, TimeoutError):
                if (found := await each) is not None:
                    return found
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return None


class ResponseHolders:
    """The replicas that hold responses of one service, by the IDs of the responses. A file in the
    folder outlives the process; without a folder, or if the file cannot be used, nothing does.
    """

    def __init__(self, folder: Path | None = None, service: str = "") -> None:
        # the replica of each response, and the ID of the key that it belongs to, or ""
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._path = None
        if folder is not None:
            self._path = folder / f"responses-{sha256(service.encode()).hexdigest()[:32]}"
        self._fd, self._written = -1, 0
        self._try(self._load)

    def add(self, response_id: str, replica: str, key_id: str = "") -> None:
        """Note the replica of a response. It stays with its first key: a replica that states the
        ID of another response gives it to no key."""
        former = self._known.get(response_id)
        made = replica, key_id if former is None else former[1]
        self._remember(response_id, made)
        if made != former:
            self._try(lambda: self._write(response_id, made))

    def find(self, response_id: str) -> str | None:
        """Return the replica that has made a response, or None if this is not known."""
        found = self._known.get(response_id)
        return None if found is None else found[0]

    def owns(self, key_id: str, response_id: str) -> bool | None:
        """Return whether a response belongs to a key, or None if this is not known."""
        found = self._known.get(response_id)
        return None if found is None else found[1] == key_id

    def remove(self) -> None:
        """Delete the file, because the service is gone."""
        path = self._path
        self._stop_writing()
        if path is not None:
            self._try(lambda: path.unlink(missing_ok=True))

    def _remember(self, response_id: str, made: tuple[str, str]) -> None:
        self._known[response_id] = made
        self._known.move_to_end(response_id)
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)

    def _try(self, step: Callable[[], None]) -> None:
        """Take a step with the file; after an error, do without the file."""
        try:
            step()
        except OSError as error:
            _log.warning("responses are forgotten at the end of the gateway: %s", error)
            self._stop_writing()

    def _stop_writing(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._path, self._fd = None, -1

    def _load(self) -> None:
        if self._path is None or not os.path.lexists(self._path):
            return
        fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if not S_ISREG(os.fstat(fd).st_mode):
                raise OSError(f"{self._path} is not a file")
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _FILE_MAX))
            for line in _LINE.finditer(file.read(_FILE_MAX)):
                self._remember(line[1].decode(), (line[2].decode(), (line[3] or b"").decode()))

    def _write(self, response_id: str, made: tuple[str, str]) -> None:
        if self._path is None:
            return
        if self._fd < 0 or self._written >= _KNOWN_MAX:
            self._rewrite(self._path)
        else:
            os.write(self._fd, _write_line(response_id, made).encode())
            self._written += 1

    def _rewrite(self, path: Path) -> None:
        """Replace the file by one with the known responses, without those that were forgotten."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        new = path.with_name(f"{path.name}.new")
        self._fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        lines = "".join(_write_line(name, made) for name, made in self._known.items())
        os.write(self._fd, lines.encode())
        new.rename(path)
        self._written = 0


def _write_line(response_id: str, made: tuple[str, str]) -> str:
    replica, key_id = made
    return f"{response_id} {replica} @{key_id}\n" if key_id else f"{response_id} {replica}\n"


class ResponseIdReader:
    """Finds the ID of a response in the beginning of its answer or stream."""

    __slots__ = ("_rest", "_seen")

    def __init__(self) -> None:
        self._rest, self._seen = b"", 0

    def feed(self, data: bytes) -> str | None:
        """Return the ID once it has passed, "" if none will, and None while it may follow."""
        found = _ID.search(self._rest + data)
        if found:
            return found[1].decode()
        self._seen += len(data)
        self._rest = (self._rest + data)[-_ID_LONGEST:]
        return None if self._seen < _BEGIN else ""
