"""What each node has at hand beside its own disk: `volumes`."""

import re

from cavvy.domain.tasks import Volume, VolumeKind
from cavvy.spec.fields.amounts import DISK_SIZE
from cavvy.spec.fields.kinds import (
    FLAG,
    FieldSpec,
    ListKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    either,
    hints_for,
    matching,
    text_kind,
)
from cavvy.spec.fields.paths import check_folder, check_path
from cavvy.spec.problems import shown

_WORDS = (
    "SOURCE:PATH such as data:/mnt/data, /scratch:/scratch or server:/export:/data, with :ro "
    "to read only"
)
_check_name = matching(
    r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?",
    "is no volume's name",
    expected="letters, digits and . _ -",
)
_NO_FULL_PATH = "is no full path, and a provider's volume needs one"


def _check_export(text: str) -> str:
    check = matching(
        r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):(/[^:]*)",
        "is no NFS export",
        expected="SERVER:/EXPORT",
    )
    return check(text.strip())


def _read_short(text: str) -> Volume:
    text = text.strip()
    rest = re.sub(r":r[ow]\Z", "", text)
    if "://" in rest:
        raise WrongValue(
            f"{shown(text)} is a URL", suggestion="write it as one of `inputs` or `outputs`"
        )
    source, _, path = rest.rpartition(":")
    if not source or not path:
        raise WrongValue(f"{shown(text)} does not say what and where", expected=_WORDS)
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
        message = "`type` is of a volume that is made, and there is no `size`"
        table.wrong("type", message, suggestion="add `size`")
    if not table.get("keep", True) and not table.has("size"):
        message = "a volume that is not kept is made for the work, and there is no `size`"
        table.wrong("keep", message)
    if volume is not None and not volume.path.startswith("/"):
        table.wrong("path", f"{shown(volume.path)} {_NO_FULL_PATH}")
    return volume if source else None


_TABLE = SectionSpec(
    "volumes",
    "One volume as a table: exactly one of `name`, `host` and `nfs`, and the path.",
    (
        FieldSpec(
            "name",
            text_kind("a volume's name", _check_name, numbers=True),
            "A volume of the provider by its own name or id: a cloud's disk, a cluster's "
            "persistent volume claim.",
            "imagenet",
            to=(),
        ),
        FieldSpec(
            "host",
            text_kind("a full path on the node", check_folder),
            "A folder that the node has already: of the host, or of a file system that is mounted "
            "there.",
            "/scratch",
            to=(),
        ),
        FieldSpec(
            "nfs",
            text_kind("an export as SERVER:/EXPORT", _check_export),
            "An NFS export. Where it is mounted already that is used; otherwise the node mounts "
            "it, which takes root.",
            "nas.example.org:/export/data",
            to=(),
        ),
        FieldSpec(
            "path",
            text_kind("a full path, or one within the working folder", check_path),
            "Where the work sees it: a full path, or (`host` and `nfs`) one within the working "
            "folder.",
            "/data",
            required=True,
        ),
        FieldSpec(
            "read_only",
            FLAG,
            "Whether the work may only read. Refused on a node that cannot make it so.",
            "true",
            "false",
        ),
        FieldSpec(
            "size",
            DISK_SIZE,
            "With `name`: make the volume with this size where there is none of that name. A bare "
            "number is GiB.",
            "200GB",
            "it must exist",
            to=("size_gib",),
        ),
        FieldSpec(
            "type",
            text_kind(
                "a disk type or storage class by its provider's name, such as gp3", _check_name
            ),
            "With `size`: of which type it is made.",
            "gp3",
            "the provider's default",
        ),
        FieldSpec(
            "keep",
            FLAG,
            "With `size`: `false` makes the volume anew for each attempt and removes it, and its "
            "files, at the end.",
            "false",
            "true",
        ),
        FieldSpec(
            "options",
            text_kind(
                "mount's options",
                matching(
                    r"[A-Za-z0-9._=,:-]+",
                    "is no list of mount's options",
                    expected="such as nfsvers=4.1,nconnect=8",
                ),
            ),
            "With `nfs`: options of mount.",
            "nfsvers=4.1",
        ),
    ),
    _build,
    hints_for(
        {
            "write `path`": "mount_path mount target",
            "write `host`": "instance_path host_path hostPath",
            "write `name`": "claim",
            "write `read_only`": "readOnly",
            "write `nfs: SERVER:/EXPORT`": "server",
        }
    ),
)
VOLUMES = ListKind(
    either(text_kind(_WORDS, _read_short), lambda volume: volume, _TABLE), single=True
)


def check_volumes(table: SectionReader) -> None:
    """Note where two volumes of the file claim one path."""
    paths = [each.path for each in table.get("volumes", ())]
    for path in dict.fromkeys(path for path in paths if paths.count(path) > 1):
        table.wrong(
            "volumes",
            f"two volumes are to be seen under {path}",
            suggestion="change one of the paths",
        )
