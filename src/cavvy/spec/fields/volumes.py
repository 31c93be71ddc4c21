"""The field `volumes`: the volumes that each node mounts."""

import re

from cavvy.domain.tasks import Volume, VolumeKind
from cavvy.spec.fields.amounts import DISK_SIZE
from cavvy.spec.fields.kinds import (
    FLAG,
    FieldSpec,
    ListKind,
    SectionReader,
    WrongValue,
    either,
    matching,
    section,
    text_kind,
)
from cavvy.spec.fields.paths import check_folder, check_path
from cavvy.spec.problems import shown

_WORDS = (
    "SOURCE:PATH such as data:/mnt/data, /scratch:/scratch or server:/export:/data, with :ro at "
    "the end for read-only"
)
_check_name = matching(
    r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?",
    "is not a volume name",
    expected="letters, digits and . _ -",
)
_NO_FULL_PATH = "is not an absolute path; a provider's volume needs an absolute path"


def _check_export(text: str) -> str:
    check = matching(
        r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):(/[^:]*)",
        "is not an NFS export",
        expected="SERVER:/EXPORT",
    )
    return check(text.strip())


def _read_short(text: str) -> Volume:
    text = text.strip()
    rest = re.sub(r":r[ow]\Z", "", text)
    if "://" in rest:
        raise WrongValue(
            f"{shown(text)} is a URL", suggestion="add the URL to `inputs` or `outputs` instead"
        )
    source, _, path = rest.rpartition(":")
    if not source or not path:
        raise WrongValue(f"{shown(text)} needs a source and a path", expected=_WORDS)
    if source.startswith(("/", "~", ".")):
        kind, source = VolumeKind.HOST, check_folder(source)
    elif ":" in source:
        kind, source = VolumeKind.NFS, _check_export(source)
    else:
        kind, source = VolumeKind.NAMED, _check_name(source)
    target = check_path(path)
    if kind is VolumeKind.NAMED and not target.startswith("/"):
        raise WrongValue(f"{shown(path)} {_NO_FULL_PATH}", suggestion=f"write /{path}")
    return Volume(kind=kind, source=source, path=target, read_only=text.endswith(":ro"))


_KINDS = {"name": VolumeKind.NAMED, "host": VolumeKind.HOST, "nfs": VolumeKind.NFS}


def _build(table: SectionReader) -> Volume | None:
    owner = table.find_one(tuple(_KINDS), "the volume")
    if not owner:
        return None
    kind, source = _KINDS[owner], table.get(owner)
    volume = table.make(Volume, kind=kind, source=source or "")
    if kind is not VolumeKind.NFS:
        table.reject_beside(owner, ("options",))
    if kind is not VolumeKind.NAMED:
        table.reject_beside(owner, ("size", "type", "keep"))
        return volume if source else None
    if table.has("type") and not table.has("size"):
        message = "`type` needs `size`: both keys describe a volume that Cavvy creates"
        table.wrong("type", message, suggestion="add `size`")
    if not table.get("keep", True) and not table.has("size"):
        message = "`keep: false` needs `size`, because only new volumes can be deleted"
        table.wrong("keep", message)
    if volume is not None and not volume.path.startswith("/"):
        table.wrong("path", f"{shown(volume.path)} {_NO_FULL_PATH}")
    return volume if source else None


_TABLE = section(
    "volumes",
    _build,
    name=FieldSpec(text_kind("a volume's name", _check_name, numbers=True), to=()),
    host=FieldSpec(text_kind("an absolute path on the node", check_folder), to=()),
    nfs=FieldSpec(text_kind("an NFS export in the form SERVER:/EXPORT", _check_export), to=()),
    path=FieldSpec(
        text_kind("an absolute path, or a path within the working folder", check_path),
        required=True,
    ),
    read_only=FLAG,
    size=FieldSpec(DISK_SIZE, to=("size_gib",)),
    type=text_kind("a disk type or storage class by its provider's name, such as gp3", _check_name),
    keep=FLAG,
    options=text_kind(
        "mount's options",
        matching(
            r"[A-Za-z0-9._=,:-]+",
            "is not a list of mount options",
            expected="such as nfsvers=4.1,nconnect=8",
        ),
    ),
)
VOLUMES = ListKind(
    either(text_kind(_WORDS, _read_short), lambda volume: volume, _TABLE), single=True
)


def check_volumes(table: SectionReader) -> None:
    """Add a problem if two volumes have the same path."""
    paths = [each.path for each in table.get("volumes", ())]
    for path in dict.fromkeys(path for path in paths if paths.count(path) > 1):
        table.wrong(
            "volumes",
            f"two volumes have the path {path}",
            suggestion="use different paths",
        )
