"""`cavvy.Volume` and `cavvy.Secret`: what functions find on their nodes.

This file also runs on nodes, so it imports only the standard library and files that do.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from cavvy.sdk.errors import InvalidArgument

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


@dataclass(frozen=True)
class FunctionVolume:
    """Files that outlive jobs, at a path of `volumes`: `{"/cache": cavvy.Volume("models")}`.

    `Volume("models")` is a volume of the provider, such as a cloud disk or a claim of a cluster,
    which is made with `size` if it does not exist; on this machine, and on one of the hosts by SSH,
    it is a folder, which is made without it, too. `Volume.folder`, `nfs` and `bucket` are folders
    of the node, exports and buckets.
    """

    name: str
    size: str | None = None
    type: str | None = None
    _table: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _key: str = field(default="volumes", repr=False)  # the key of the task

    def __post_init__(self) -> None:
        if not self._table and not (isinstance(self.name, str) and _NAME.fullmatch(self.name)):
            raise InvalidArgument(
                f"Volume: {self.name!r} is no name of a volume",
                'use Volume.folder("/scratch"), Volume.nfs("server:/export") or '
                'Volume.bucket("s3://bucket/folder") for these',
            )

    @classmethod
    def folder(cls, path: str | os.PathLike[str]) -> Self:
        """Return a folder that exists on the node, on its own disk or on a shared file system."""
        return cls(os.fspath(path), _table={"host": os.fspath(path)})

    @classmethod
    def nfs(cls, export: str, *, options: str | None = None) -> Self:
        """Return an NFS export, such as "server:/export"."""
        more = {} if options is None else {"options": options}
        return cls(export, _table={"nfs": export, **more})

    @classmethod
    def bucket(cls, url: str, *, writable: bool = False, cached: bool = False) -> Self:
        """Return the mounted folder of a bucket, such as "s3://bucket/models"; with `cached`, the
        node's disk keeps what was read."""
        table = {"source": url, "mode": "cached" if cached else "mount"}
        return cls(url, _table=table | ({"writable": True} if writable else {}), _key="inputs")

    def read_only(self) -> Self:
        """Return this volume for functions that do not change it."""
        if self._key == "inputs":
            table = {key: value for key, value in self._table.items() if key != "writable"}
            return replace(self, _table=table)
        return replace(self, _table={**self._list_keys(), "read_only": True})

    def commit(self) -> None:
        """Wait until what this function has written is on the volume's disk. Others see files as
        soon as these are closed; in a bucket, some time later."""
        if "CAVVY_JOB" in os.environ:
            os.sync()

    def reload(self) -> None:
        """Do nothing: a volume shows what others have written, as its file system does."""

    def to_entry(self, path: str) -> tuple[str, dict[str, Any]]:
        """Return a key of the task, and the entry that puts the volume at this path."""
        return self._key, {**self._list_keys(), "target" if self._key == "inputs" else "path": path}

    def _list_keys(self) -> dict[str, Any]:
        keys = dict(self._table) if self._table else {"name": self.name}
        sizes = {"size": self.size, "type": self.type}
        return keys | {key: value for key, value in sizes.items() if value is not None}


class FunctionSecret:
    """Secrets of the project, which functions find as environment variables of these names:
    `secrets=[cavvy.Secret("HF_TOKEN")]`. `cavvy secret set HF_TOKEN` stores one.
    """

    def __init__(self, *names: str) -> None:
        for each in names or ("",):
            if not isinstance(each, str) or not _VARIABLE.fullmatch(each):
                raise InvalidArgument(
                    f"Secret: {each!r} is no name of a secret",
                    "name the variables, such as Secret('HF_TOKEN'); `cavvy secret set` stores "
                    "their values",
                )
        self.names = names

    def __repr__(self) -> str:
        return f"Secret({', '.join(map(repr, self.names))})"


def list_secrets(given: "Sequence[str | FunctionSecret] | str | FunctionSecret") -> list[str]:
    """Return the names of secrets. Raises InvalidArgument."""
    listed = [given] if isinstance(given, str | FunctionSecret) else list(given)
    found: list[str] = []
    for each in listed:
        found += (each if isinstance(each, FunctionSecret) else FunctionSecret(each)).names
    return list(dict.fromkeys(found))


def list_volumes(volumes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the keys of the task for volumes by their path: texts are sources of a task file."""
    keys: dict[str, list[Any]] = {}
    for path, source in volumes.items():
        if isinstance(source, FunctionVolume):
            key, entry = source.to_entry(path)
            keys.setdefault(key, []).append(entry)
        else:
            keys.setdefault("volumes", []).append(f"{source}:{path}")
    return keys
