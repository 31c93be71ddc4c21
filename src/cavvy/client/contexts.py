"""Contexts: the servers that this user signed in to. The file `contexts.json` in the state folder
contains each server's address and token, the name of the context that commands use, and the
project that was chosen on each server.

`local` is the name of the embedded server of this machine, which needs no context.
"""

import os
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.json import decode, encode, format
from msgspec.structs import replace

from cavvy.client.errors import ApiError
from cavvy.client.state import read_server, write_private

LOCAL = "local"


class Context(Struct, frozen=True, kw_only=True):
    """A server and the token for it. `ca` contains the certificates of the authorities to trust for
    the server, in PEM; if it is empty, the system's authorities are trusted.
    """

    name: str
    address: str
    token: str
    ca: str = ""


class Contexts(Struct, frozen=True, kw_only=True):
    """The contents of `contexts.json`. `current` is `local` or the name of a context. `projects`
    contains, by the name of a context, the project that `cavvy project use` chose.
    """

    current: str = LOCAL
    contexts: Sequence[Context] = ()
    projects: Mapping[str, str] = {}

    def find(self, name: str) -> Context | None:
        return next((each for each in self.contexts if each.name == name), None)

    def with_context(self, context: Context) -> "Contexts":
        """Return a copy in which this context is current. The context replaces a context of the
        same name.
        """
        others = [each for each in self.contexts if each.name != context.name]
        before = self.find(context.name)
        moved = before is not None and before.address != context.address
        return Contexts(
            current=context.name,
            contexts=[*others, context],
            projects=self._projects_without(context.name) if moved else self.projects,
        )

    def without(self, name: str) -> "Contexts":
        """Return a copy without the context of this name. If the removed context was current, the
        embedded server becomes current.
        """
        others = [each for each in self.contexts if each.name != name]
        return Contexts(
            current=LOCAL if self.current == name else self.current,
            contexts=others,
            projects=self._projects_without(name),
        )

    def with_project(self, name: str, project: str) -> "Contexts":
        """Return a copy in which commands use this project on the server of the context."""
        return replace(self, projects={**self.projects, name: project})

    def _projects_without(self, name: str) -> Mapping[str, str]:
        return {each: project for each, project in self.projects.items() if each != name}

    def switched(self, name: str) -> "Contexts":
        """Return a copy in which the context of this name is current. Raises ApiError
        `context-unknown`.
        """
        if name != LOCAL and self.find(name) is None:
            raise _unknown(name, self)
        return replace(self, current=name)


def read_contexts(home: str) -> Contexts:
    """Read the contexts. Raises ApiError if the file cannot be read."""
    path = _path(home)
    try:
        with open(path, "rb") as file:
            return decode(file.read(), type=Contexts)
    except (FileNotFoundError, NotADirectoryError):  # The state folder may be a file; see `launch`.
        return Contexts()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "the file was not written by `cavvy login`"
        raise ApiError(
            "contexts-unreadable",
            f"{path} cannot be read: {reason}",
            "check who owns the file and its folder"
            if isinstance(error, OSError)
            else "repair the file; or remove it, and sign in again with `cavvy login`",
        ) from error


def write_contexts(home: str, contexts: Contexts) -> None:
    """Replace the file, which only its owner can read. Raises ApiError."""
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
        write_private(_path(home), format(encode(contexts)))
    except OSError as error:
        raise ApiError(
            "contexts-unwritable",
            f"{_path(home)} cannot be written: {error.strerror}",
            "check the folder's permissions and its free space",
        ) from error


def chosen_context(home: str) -> Context | None:
    """Return the context that commands use: the context that CAVVY_CONTEXT names, or else the
    current context. Returns None for the embedded server. Raises ApiError `context-unknown`.
    """
    contexts = read_contexts(home)
    name = used_context(contexts)
    if name == LOCAL:
        return None
    context = contexts.find(name)
    if context is None:
        raise _unknown(name, contexts)
    return context


def used_context(contexts: Contexts) -> str:
    """Return the name of the context that commands use."""
    return os.environ.get("CAVVY_CONTEXT") or contexts.current


def may_have_server(home: str) -> bool:
    """Return whether commands have a server to ask without starting one. Raises ApiError
    `context-unknown`.
    """
    return chosen_context(home) is not None or read_server(home) is not None


def _path(home: str) -> str:
    return os.path.join(home, "contexts.json")


def _unknown(name: str, contexts: Contexts) -> ApiError:
    known = ", ".join([LOCAL, *sorted(each.name for each in contexts.contexts)])
    return ApiError(
        "context-unknown",
        f"there is no context {name!r}",
        f"the contexts are {known}; `cavvy login https://SERVER` adds a context",
    )
