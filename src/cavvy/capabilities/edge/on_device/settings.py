"""The settings that a device gets from its server: options of its program, and variables for the
engines of its models. The server checks them before it stores them, and the device when it has
fetched them: a stolen server must not load a library into an engine.

A device keeps them in `settings.json`, whose secrets only its user reads, and applies them without
the server after a restart. `edge.json`, which the device's owner writes, may refuse them all with
`"managed": false`, and keeps the last word on `share`, which opens a port.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress

from .slots import read_json, remove, write_json
from .tasks import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The smallest and the largest value of each number. With a longer `every_s` and its jitter, the
# server would take a device for offline, which it does after ten minutes.
NUMBERS = {
    "every_s": (10.0, 480.0),
    "look_s": (0.1, 60.0),
    "probation_s": (0.0, 86_400.0),
    "spool_mib": (1.0, 65_536.0),
}
SHARE = "share"
MOST_VARIABLES = 64  # also of those that are secrets
MOST_VALUE = 4096  # characters of a variable that is not a secret
_MOST_BYTES = 64 * 1024  # of all variables as JSON; Linux has 128 KiB for one of them
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_FOUR = re.compile(r"(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3}):(\d{4,5})")
# Variables that the device sets, and those by which a program loads other code.
_RESERVED = {"PATH", "HOME", "TMPDIR", "SHELL", "USER", "LOGNAME", "PWD", "IFS", "ENV", "BASH_ENV"}
_RESERVED |= {"GCONV_PATH", "GLIBC_TUNABLES", "LOCPATH", "NLSPATH", "OPENSSL_CONF"}
_RESERVED |= {"OPENSSL_ENGINES", "OPENSSL_MODULES", "NODE_OPTIONS", "PERL5LIB", "PERL5OPT"}
_RESERVED |= {"BASHOPTS", "SHELLOPTS", "PS4", "PROMPT_COMMAND", "PERLLIB", "PERL5DB", "NODE_PATH"}
_RESERVED |= {"RUBYOPT", "RUBYLIB", "CLASSPATH", "OMP_TOOL_LIBRARIES", "CONTAINER_HOST"}
_BEGINNINGS = (
    *("CAVVY_", "LD_", "DYLD_", "PYTHON", "MALLOC_", "CUDA_INJECTION", "NVTX_INJECTION"),
    *("JAVA_", "_JAVA_", "JDK_", "LUA_", "GST_PLUGIN", "OCL_ICD_", "VK_", "DOCKER_"),
    *("CONTAINERS_", "XDG_"),
)


class SettingRefused(ValueError):
    """Raised if a device could not use a setting. The text has no value of a variable."""


def check_name(name: str) -> None:
    """Raise SettingRefused unless this can be the name of a variable of engines."""
    if not _VARIABLE.fullmatch(name):
        raise SettingRefused(
            f"{name[:80]!r} cannot be a variable; expected letters, digits and _, at most 128, not "
            "beginning with a digit"
        )
    if name.upper() in _RESERVED or name.upper().startswith(_BEGINNINGS):
        raise SettingRefused(f"{name} cannot be set: the device sets it, or it could load code")


def check_variable(name: str, value: Any, most: int = MOST_VALUE) -> str:
    """Return the value of a variable of engines. Raises SettingRefused."""
    check_name(name)
    if not isinstance(value, str) or len(value) > most or "\0" in value:
        raise SettingRefused(f"{name} must be a text of at most {most:,} characters without NUL")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SettingRefused(f"{name} is not a valid text") from error
    return value


def check_option(name: str, value: Any) -> float | str:
    """Return the value of an option of the device's program, perhaps one that was a text. Raises
    SettingRefused."""
    if name == SHARE:
        found = _FOUR.fullmatch(value) if isinstance(value, str) else None
        numbers = [int(each) for each in found.groups()] if found else []
        right = numbers and max(numbers[:4]) < 256 and 1024 <= numbers[4] < 65_536
        if value == "" or right:
            return str(value)
        raise SettingRefused(
            f"{name} is {str(value)[:80]!r}; expected an address and a port from 1024, such as "
            "0.0.0.0:8090, or nothing to end it"
        )
    if name not in NUMBERS:
        raise SettingRefused(f"there is no setting {name[:80]!r}; known: {', '.join(list_known())}")
    least, most = NUMBERS[name]
    number = None if isinstance(value, bool) else value
    with suppress(OverflowError, TypeError, ValueError):
        number = float(value) if number is not None else None
    if not isinstance(number, float) or not least <= number <= most:
        told = str(value)[:80]
        raise SettingRefused(f"{name} is {told!r}; expected a number from {least:g} to {most:,g}")
    return number


def read_pair(name: str, value: str) -> tuple[bool, float | str]:
    """Return whether a user's KEY=VALUE is an option of the program, and its value. Raises
    SettingRefused."""
    if name in list_known():
        return True, check_option(name, value)
    if name != name.upper():  # a misspelt option must not become a variable
        raise SettingRefused(
            f"there is no setting {name[:80]!r}; expected {', '.join(list_known())}, or a variable "
            "for engines in capital letters"
        )
    return False, check_variable(name, value)


def list_known() -> list[str]:
    """Return the names of the options."""
    return [*NUMBERS, SHARE]


class HeldSettings:
    """Settings of one revision, "" without any. `left_out` says which of them this device cannot
    use."""

    def __init__(self, told: Any = None) -> None:
        """Raises SettingRefused if the server cannot have sent this."""
        told = {"revision": ""} if told is None else told
        tables = [told.get(each, {}) if isinstance(told, dict) else None for each in _TABLES]
        revision: Any = told.get("revision") if isinstance(told, dict) else None
        closed: Any = told.get("undecrypted", []) if isinstance(told, dict) else None
        texts = [each for table in tables if isinstance(table, dict) for each in table]
        if not (
            isinstance(revision, str)
            and len(revision) <= 64
            and all(isinstance(table, dict) for table in tables)
            and len(texts) <= MOST_VARIABLES + len(NUMBERS) + 8
            and isinstance(closed, list)
            and len(closed) <= MOST_VARIABLES
        ):
            raise SettingRefused("the settings of the server are not valid, or too many")
        self.revision: str = revision
        self.left_out: list[str] = []
        self._told = {"revision": revision, **dict(zip(_TABLES, tables, strict=True))}
        if closed:
            self._told["undecrypted"] = closed
            names = ", ".join(str(each)[:128] for each in closed)
            self.left_out.append(f"the server cannot decrypt {names}: set it again")
        self.options = self._take(tables[0], check_option)
        self.variables = self._take(tables[1], check_variable)
        self.secrets = self._take(
            tables[2], lambda name, each: check_variable(name, each, _MOST_BYTES)
        )
        size = len(json.dumps(self.environment, ensure_ascii=False).encode())
        if size > _MOST_BYTES:
            raise SettingRefused(
                f"the variables have {size:,} bytes together; expected at most {_MOST_BYTES:,}"
            )

    def _take(self, table: Any, check: Any) -> dict[str, Any]:
        taken = {}
        for name, value in table.items():
            try:
                taken[name] = check(name, value)
            except SettingRefused as error:
                self.left_out.append(str(error))
        return taken

    @property
    def environment(self) -> dict[str, str]:
        """The variables of engines."""
        return {**self.variables, **self.secrets}

    def withdraws(self, former: HeldSettings) -> bool:
        """Return whether a secret's former value is no longer to be on the device."""
        return any(self.secrets.get(name) != value for name, value in former.secrets.items())

    def without_secrets(self) -> HeldSettings:
        """Return what a retired device may keep."""
        return HeldSettings({**self._told, "revision": "retired", "secrets": {}})

    def without_withdrawn(self, told: Any) -> HeldSettings:
        """Return these settings without the secrets that others, which cannot be used, do not have
        with the same value."""
        secrets = told.get("secrets") if isinstance(told, dict) else None
        if not isinstance(secrets, dict):
            return self
        kept = {name: value for name, value in self.secrets.items() if secrets.get(name) == value}
        return self if kept == self.secrets else HeldSettings({**self._told, "secrets": kept})

    def tell(self) -> dict[str, Any]:
        """Return what the server has told, also what this program cannot use: its next version may
        know it."""
        return self._told


_TABLES = ("options", "variables", "secrets")


class ServerSettings:
    """What a device has of its server's settings: `held`, the newest revision that it could not
    apply (`refused`), and why. `stated` is what its `edge.json` has."""

    def __init__(self, folder: str, stated: dict[str, Any]) -> None:
        self._path, self._stated = f"{folder}/settings.json", stated
        self.wanted, self.trouble = "", ""
        self.refused: str | None = None
        self.held = HeldSettings()
        if not self._is_managed:
            self.keep(self.held)
        else:  # a damaged file is fetched again
            with suppress(SettingRefused):
                self.held = HeldSettings(read_json(self._path))

    @property
    def _is_managed(self) -> bool:
        return self._stated.get("managed") is not False

    @property
    def options(self) -> dict[str, Any]:
        """The options that are used."""
        return {name: each for name, each in self.held.options.items() if not self._is_own(name)}

    def _is_own(self, name: str) -> bool:
        return name == SHARE and SHARE in self._stated

    def want(self, revision: Any) -> bool:
        """Note the revision that the server has for this device. Return whether to fetch it. An
        older server has none."""
        if not isinstance(revision, str) or len(revision) > 64:
            return False
        self.wanted = revision
        return self._is_managed and self.wanted not in (self.held.revision, self.refused)

    def keep(self, fresh: HeldSettings) -> None:
        """Use other settings from now on, also after a restart."""
        self.held, self.refused, self.trouble = fresh, None, ""
        try:
            if fresh.tell() != HeldSettings().tell():
                write_json(self._path, fresh.tell())
            else:
                remove(self._path)
        except OSError as error:
            say(f"the settings of the server are not kept for the next start: {error}")
            for each in (self._path, f"{self._path}.new"):  # nor are secrets of a former revision
                with suppress(OSError):
                    os.remove(each)

    def refuse(self, revision: str, why: str) -> None:
        """Note that a revision is not used, and not fetched again."""
        self.refused, self.trouble = revision, why
        say(f"settings {revision}: {why}")

    def tell(self) -> dict[str, str]:
        """Return what the server is told."""
        found = [self.trouble, *self.held.left_out]
        if not self._is_managed and self.wanted:
            found.append('the device takes no settings: its edge.json has "managed": false')
        own = [each for each in self.held.options if self._is_own(each)]
        found += [f"edge.json of the device sets {each}" for each in own]
        return {"settings": self.held.revision, "settings_problem": "; ".join(filter(None, found))}


def find_every_s(folder: str) -> float:
    """Return the interval between two check-ins, in seconds, as far as the files tell."""
    stated = read_json(f"{folder}/edge.json") or {}
    managed = {} if stated.get("managed") is False else read_json(f"{folder}/settings.json") or {}
    options = managed.get("options")
    found = options.get("every_s") if isinstance(options, dict) else None
    for every in (found, stated.get("every_s")):
        if isinstance(every, (int, float)) and not isinstance(every, bool):
            return float(every)
    return 60.0
