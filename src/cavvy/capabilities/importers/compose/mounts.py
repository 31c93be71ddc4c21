"""Reads the files that a Compose file gives to a service as `configs` and `secrets`, and the names
of hosts in `extra_hosts`, by https://docs.docker.com/reference/compose-file/services.
"""

import ipaddress
import posixpath
import re
from collections.abc import Iterator
from hashlib import sha256
from shlex import quote

from cavvy.capabilities.importers.compose.values import ComposeReader, find_inside
from cavvy.domain.tasks import Volume, VolumeKind
from cavvy.domain.values import Struct
from cavvy.spec.problems import SourceMark
from cavvy.spec.tree import ListNode, MapNode, Node

_SECRETS = "/run/secrets"
_GATEWAY = "host-gateway"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


class ServiceFiles(Struct, frozen=True, kw_only=True):
    """The files of a service: those that are mounted, the commands that write the others, and the
    secrets that these need.
    """

    volumes: tuple[Volume, ...] = ()
    commands: str = ""
    secrets: tuple[str, ...] = ()


class _Grant(Struct, frozen=True, kw_only=True):
    """A file that a service names: its name in the file's own table, and where it is to be."""

    source: str
    target: str
    mode: str
    mark: SourceMark


def read_files(name: str, table: MapNode, reader: ComposeReader) -> ServiceFiles:
    """Return the files of the `configs` and `secrets` of a service."""
    volumes, commands, secrets = list[Volume](), "", dict[str, None]()
    for grant in _list_grants(table.get("configs"), reader):
        definition = _find(name, "configs", grant, reader)
        if definition is None:
            continue
        path = grant.target if grant.target.startswith("/") else f"/{grant.target}"
        content, file = definition.get("content"), definition.get("file")
        if content is not None:
            text = reader.text(content)
            if "${{" in text:
                message = "the content has `${{`, which has a meaning in Cavvy files"
                reader.notes.add(content.mark, message, suggestion="write it into a `file`")
            commands += _write(path, text, grant.mode)
        elif file is not None:
            source = inside(reader.text(file), file.mark, reader)
            if not (reader.folder / source).is_file():
                hint = "create it, or correct its path"
                reader.notes.add(file.mark, f"there is no file {source}", suggestion=hint)
            volumes.append(Volume(kind=VolumeKind.FOLDER, source=source, path=path, read_only=True))
        elif (variable := definition.get("environment")) is not None:
            value = reader.find(reader.text(variable), variable.mark) or ""
            commands += _write(path, value, grant.mode)
        else:
            message = f"the config {grant.source} is kept by Docker, and is not in this file"
            hint = "write its `content`, or a `file` beside this one"
            reader.notes.add(grant.mark, message, suggestion=hint)
    for grant in _list_grants(table.get("secrets"), reader):
        definition = _find(name, "secrets", grant, reader)
        if definition is None:
            continue
        stored = _name_secret(grant, definition, reader)
        secrets[stored] = None
        path = grant.target if grant.target.startswith("/") else f"{_SECRETS}/{grant.target}"
        folder = quote(posixpath.dirname(path))
        commands += f'mkdir -p {folder} && printf %s "${stored}" > {quote(path)} || exit\n'
        commands += f"chmod {grant.mode or '444'} {quote(path)}\n"
    return ServiceFiles(volumes=tuple(volumes), commands=commands, secrets=tuple(secrets))


def read_hosts(table: MapNode, reader: ComposeReader) -> str:
    """Return the commands that make the names in `extra_hosts` known."""
    lines = ""
    for name, address, mark in _list_hosts(table.get("extra_hosts"), reader):
        if address == _GATEWAY:
            message = f"{name} is the machine of Docker, which a job does not reach"
            hint = "run what it has as a service of this file, or name an address that is public"
            reader.notes.add(mark, message, suggestion=hint)
            continue
        try:
            found = ipaddress.ip_address(address.strip("[]"))
        except ValueError:
            reader.notes.add(mark, f"{address!r} is no address", expected="NAME:ADDRESS")
            continue
        if not _HOST.fullmatch(name):
            reader.notes.add(mark, f"{name!r} is no name of a host", expected="NAME:ADDRESS")
            continue
        lines += f"echo {quote(f'{found} {name}')} >> /etc/hosts || exit\n"
    return lines


def inside(path: str, mark: SourceMark, reader: ComposeReader) -> str:
    """Return a path in the folder of the file, which is submitted."""
    if "://" in path or path.startswith("git@"):
        hint = "build the image yourself, push it, and name it in `image`"
        reader.notes.add(mark, f"{path} is not built here", suggestion=hint)
        return "."
    plain = posixpath.normpath(path)
    if plain.startswith(("/", "..", "~")):
        hint = "move it into the folder of this file, or this file above it"
        message = f"{path} is outside of the folder of this file, which is submitted"
        reader.notes.add(mark, message, suggestion=hint)
        return "."
    return plain


def _list_hosts(node: Node | None, reader: ComposeReader) -> Iterator[tuple[str, str, SourceMark]]:
    """Yield the names and addresses of hosts, from a table, or a list of NAME:ADDRESS."""
    if isinstance(node, MapNode):
        yield from ((key.text, reader.text(value), key.mark) for key, value in node.entries)
    for each in node.items if isinstance(node, ListNode) else ():
        name, _, address = re.sub("[=:]", "\n", reader.text(each), count=1).partition("\n")
        yield name.strip(), address.strip(), each.mark


def _list_grants(node: Node | None, reader: ComposeReader) -> Iterator[_Grant]:
    for each in node.items if isinstance(node, ListNode) else ():
        if not isinstance(each, MapNode):
            name = reader.text(each)
            yield _Grant(source=name, target=name, mode="", mark=each.mark)
            continue
        for key, _ in each.entries:
            if key.text in ("uid", "gid"):
                reader.kept.note(key.mark, key.text, "the image's user owns the file")
            elif key.text not in ("source", "target", "mode"):
                expected = "source, target, mode, uid and gid"
                reader.notes.add(key.mark, f"{key.text!r} is unknown here", expected=expected)
        source, mode = reader.text(each.get("source")), reader.text(each.get("mode"))
        if mode and not re.fullmatch("0?o?[0-7]{3,4}", mode):
            reader.notes.add(each.mark, f"mode: {mode} is no mode", expected="such as 0440")
            mode = ""
        target = reader.text(each.get("target")) or source
        yield _Grant(source=source, target=target, mode=mode.replace("o", ""), mark=each.mark)


def _find(name: str, key: str, grant: _Grant, reader: ComposeReader) -> MapNode | None:
    """Return what the file says of a config or a secret, or None if it is missing, which is
    noted."""
    table = reader.root.get(key) if isinstance(reader.root, MapNode) else None
    found = table.get(grant.source) if isinstance(table, MapNode) else None
    if isinstance(found, MapNode):
        return found
    message = f"{name} uses {grant.source}, which `{key}` of the file does not have"
    reader.notes.add(grant.mark, message, suggestion=f"add `{grant.source}:` to `{key}`")
    return None


def _name_secret(grant: _Grant, definition: MapNode, reader: ComposeReader) -> str:
    """Return the name of the secret of Cavvy, and say how to set it: its value does not travel in
    files or in the text of a job."""
    variable = reader.text(definition.get("environment"))
    stored = re.sub(r"\W", "_", variable or grant.source).upper() or "SECRET"
    stored = stored if stored[0].isalpha() else f"S_{stored}"
    file = reader.text(definition.get("file"))
    how = f" --file {quote(file)}" if file else ""
    reason = f"set it with `cavvy secret set {stored}{how}`"
    if file and find_inside(reader.folder, file) is not None:
        reason += f", and name {file} in .cavvyignore, so that it is not sent with the folder"
    reader.kept.note(grant.mark, f"secrets.{grant.source}", reason)
    return stored


def _write(path: str, text: str, mode: str) -> str:
    end = f"_CAVVY_END_OF_FILE_{sha256(text.encode()).hexdigest()[:16]}"
    return (
        f"mkdir -p {quote(posixpath.dirname(path))} && cat > {quote(path)} <<'{end}' || exit\n"
        f"{text.removesuffix(chr(10))}\n{end}\nchmod {mode or '444'} {quote(path)}\n"
    )
