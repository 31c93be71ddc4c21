"""Reads the agent's documents from JSON: its configuration file, and the work that it receives with
the claim. The annotations of `documents.py` are read as text, because importing `typing` would
delay every agent's start by some milliseconds.
"""

from __future__ import annotations

import json

from . import documents
from .disk import read_text
from .documents import PROTOCOL, AgentConfigFile, WorkConfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    _T = TypeVar("_T")

TABLE = "dict[str, str]"


class BadConfig(Exception):
    """Raised if the configuration or the work does not have the format of this protocol version.
    The message names the invalid field.
    """


def _is_list_of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value)


# type -> its name in errors, and a function that tests whether a value has this type
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "int": ("a whole number", lambda value: type(value) is int),
    "float": ("a number", lambda value: type(value) in (int, float)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "list[str]": ("a list of strings", _is_list_of(str)),
    "list[int]": ("a list of whole numbers", _is_list_of(int)),
    "list": ("a list", _is_list_of(object)),
    TABLE: ("an object", lambda value: isinstance(value, dict)),
    "dict[str, int]": (
        "an object whose values are whole numbers",
        lambda value: isinstance(value, dict) and all(type(each) is int for each in value.values()),
    ),
    "TextLists": (
        "an object whose values are lists of strings",
        lambda value: isinstance(value, dict) and all(map(_is_list_of(str), value.values())),
    ),
}
EMPTY: dict[str, Callable[[], object]] = {
    "bool": bool,
    "list": list,
    "dict": dict,
    "TextLists": dict,
}


class ConfigFields:
    """Reads the fields of a JSON object. Each field has a type and a default. Errors name the
    field."""

    __slots__ = ("_raw", "_what")

    def __init__(self, raw: object, what: str) -> None:
        if not isinstance(raw, dict):
            raise BadConfig(f"{what}: expected an object, found {type(raw).__name__}")
        self._raw = raw
        self._what = what

    def read(self, name: str, kind: str, default: object = None) -> Any:
        """Read a field whose type is `kind`, an annotation such as "int" or "list[VolumeConfig]".

        If the field is missing or null, return the default. If the field has no default, return the
        empty value of `kind`: an empty list or object, False or None. Raise BadConfig if the field
        is missing, has no default, and has a type without an empty value, such as "int".
        """
        value, plain = self._raw.get(name), kind.replace(" | None", "")
        if value is None and (default is not None or plain != kind):
            return default
        if value is None and (empty := EMPTY.get(kind.partition("[")[0])):
            return empty()
        if plain in KINDS:
            expected, fits = KINDS[plain]
            if not fits(value):
                raise BadConfig(f"{self._what}: `{name}` must be {expected}, not {value!r}")
            if plain == TABLE and isinstance(value, dict):  # numbers become text, as in a shell
                return {str(key): _shown(item) for key, item in value.items()}
            return value
        record = vars(documents)[plain.replace("list[", "").rstrip("]")]
        what = f"{self._what}.{name}"
        if plain.startswith("list["):
            items = self.read(name, "list")
            return [read_record(record, ConfigFields(item, what)) for item in items]
        return read_record(record, ConfigFields(value, what))

    def inner(self, name: str) -> ConfigFields | None:
        value = self._raw.get(name)
        return None if value is None else ConfigFields(value, f"{self._what}.{name}")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


def read_record(record: type[_T], fields: ConfigFields) -> _T:
    """Read a record of `documents.py`. Raises BadConfig."""
    made = record.__new__(record)
    _fill(made, record, fields)
    return made


def _fill(made: object, record: type, fields: ConfigFields) -> None:
    """Set the record's fields, which are its annotations. Its attributes are their defaults."""
    for name, kind in record.__annotations__.items():
        object.__setattr__(made, name, fields.read(name, kind, getattr(record, name, None)))


def read_work(fields: ConfigFields) -> WorkConfig:
    """Read the work. Raises BadConfig."""
    work = read_record(WorkConfig, fields)
    work.addresses = work.addresses or ["127.0.0.1"]
    return work


class RankPaths:
    """The paths of one rank's files and folders: files that the work uses are in the rank's home
    folder, the agent's own records are in its private folder.
    """

    def __init__(self, home: str, private: str) -> None:
        self.folder = home + "/work"
        self.notice_file = home + "/notice.json"
        self.advice_file = home + "/advice.json"
        self.progress_file = home + "/progress.json"
        self.every_file = home + "/every"
        self.host_file = home + "/hosts"
        self.mpi_program = home + "/mpi.py"
        self.launchers_folder = home + "/launchers"
        self.run_script = home + "/run.sh"
        self.setup_script = home + "/setup.sh"
        self.entry_script = home + "/entry.sh"
        self.enter_script = home + "/enter.sh"
        self.phase_file = home + "/phase"  # contains the phase of a container: setup, failed or run
        # with the first file, a container asks whether its work is complete
        self.halted_file = home + "/halted"
        self.answer_file = home + "/answer"
        self.log_folder = private + "/log"
        self.outbox_file = private + "/outbox"
        self.started_file = private + "/started"
        self.status_file = private + "/status"
        self.exit_file = private + "/exit.json"
        # this file exists while messages are undelivered
        self.undelivered_file = private + "/undelivered"


class AgentConfig(AgentConfigFile, RankPaths):
    """The configuration of this agent: the file, its paths, and what is found at the start."""

    def __init__(self, fields: ConfigFields) -> None:
        _fill(self, AgentConfigFile, fields)
        self.private = self.private or self.home
        RankPaths.__init__(self, self.home, self.private)
        if self.protocol > PROTOCOL:
            raise BadConfig(
                f"configuration: `protocol` is {self.protocol}; this agent supports at "
                f"most {PROTOCOL}"
            )
        # The token that came with the claim replaces the configured one.
        self.token = read_text(self.private + "/token") or self.token
        self.pin, self.vendor = self.pin.lower(), self.vendor.lower()
        self.cache = self.cache or self.home + "/cache"
        self.caches = self.cache  # the folder that contains the caches of all projects
        self.shown: list[str] = []  # the folders below `hides` that the work sees
        self.kept = ""  # the folder for new entries of home folders; "": there are none


def read_config(path: str) -> AgentConfig:
    """Read the agent's configuration file. Raises BadConfig, OSError."""
    with open(path, encoding="utf-8") as file:
        try:
            raw = json.load(file)
        except ValueError as error:
            raise BadConfig(f"{path} is not JSON: {error}") from error
    return AgentConfig(ConfigFields(raw, "configuration"))
