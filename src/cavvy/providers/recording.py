"""Records the calls to a cloud while a gang of `cavvy check NAME --live` exists, without secrets: a
stand-in can replay the file in tests.
"""

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cavvy.providers.base import GangSpec

TAG = "cavvy-live-check"  # the calls for a gang with this label are recorded
FOLDER = "recordings"  # in the provider's own folder
_OURS = "cv-"  # prefix of the names of all machines that Cavvy makes
_MASK = "redacted"
# The values of these fields are secret, or identify the account or a person.
_SECRET = re.compile(
    r"token$|subscription_?id|secret|password|(user|custom|key)_?data|(private|public)_?key|material|jupyter|authorization"
    r"|credential|account|owner|client_?id|e_?mail|fingerprint|^arn$|^user_?id$",
    re.IGNORECASE,
)
_SCRIPTS = ("#!", "IyEv")  # starts of user data, plain and in Base64
_PAGES = frozenset({"nexttoken"})  # tokens that only name the next page of a list
# ids of AWS accounts and Azure subscriptions, also within other texts
_ACCOUNT = re.compile(r"(?<!\d)\d{12}(?!\d)|(?<=subscriptions/)[\w-]+")
_NO_ACCOUNT = "0" * 12
_MACHINE = frozenset({"id", "name", "status"})  # only machines have all of these fields


@dataclass(kw_only=True)
class _Recording:
    """The calls for one gang, in order. `since` is the index of the first call after the last
    write.
    """

    calls: list[Mapping[str, Any]] = field(default_factory=list)
    since: int = 0

    def add(self, call: Mapping[str, Any]) -> None:
        """Add a call. Repeated reads with the same reply are stored once."""
        if call["writes"]:
            self.calls.append(call)
            self.since = len(self.calls)
            return
        same = [each for each in self.calls[self.since :] if each["call"] == call["call"]]
        if not same or same[-1] != call:
            self.calls.append(call)


class CallRecorder:
    """Records calls for the gangs of one provider that have the label `TAG`. Without such a gang,
    nothing is kept.
    """

    def __init__(self, home: Path, provider: str, installation: str) -> None:
        self._folder = home / FOLDER
        self._head = {"provider": provider, "installation": installation}
        self._open: dict[str, _Recording] = {}

    def begin(self, gang: GangSpec) -> bool:
        """Start recording if the gang has the label. Returns whether the recording has just
        begun.
        """
        if TAG not in gang.labels or gang.name in self._open:
            return False
        self._open[gang.name] = _Recording()
        return True

    def add(
        self,
        call: str,
        body: object,
        outcome: Mapping[str, object],
        *,
        writes: bool,
        root: str = "",
    ) -> None:
        """Record a call and its outcome. `root` is the address of the API, which is removed from
        the texts of replies.
        """
        if not self._open:
            return
        told = {
            "call": redact(call),
            "writes": writes,
            "body": redact(body),
            **_redact_table(outcome),
        }
        text = json.dumps(told, default=_plain)
        plain = json.loads(text.replace(root, "ENDPOINT") if root else text)
        for each in self._open.values():
            each.add(plain)

    async def end(self, gang: str) -> None:
        """Write the gang's recording, if there is one."""
        recording = self._open.pop(gang, None)
        if recording is not None:
            whole = {**self._head, "gang": gang, "calls": recording.calls}
            await asyncio.to_thread(self._write, gang, json.dumps(whole, indent=1))

    def _write(self, gang: str, text: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{gang}.json"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)


def redact(value: object) -> object:
    """A copy of the value without secrets, ids of accounts, and machines that Cavvy did not
    make.
    """
    match value:
        case Mapping():
            return _redact_table(value)
        case list() | tuple():
            return [redact(each) for each in value if not _is_foreign(each)]
        case str() if value.startswith(_SCRIPTS):
            return _MASK
        case str():
            return _ACCOUNT.sub(_NO_ACCOUNT, value)
    return value


def _redact_table(table: Mapping[str, object]) -> Mapping[str, object]:
    return {
        str(key): _MASK if value and _is_secret(str(key)) else redact(value)
        for key, value in table.items()
    }


def _is_secret(field_name: str) -> bool:
    return field_name.lower() not in _PAGES and _SECRET.search(field_name) is not None


def _is_foreign(value: object) -> bool:
    """Whether the value describes a machine that Cavvy did not make."""
    found = isinstance(value, Mapping) and value.keys() >= _MACHINE
    return found and not str(value["name"]).startswith(_OURS)  # type: ignore[index]  # a mapping


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return {"$time": value.isoformat()}
    return str(value)
