"""What each node has at hand beside its own disk: `volumes`."""

import re

from cavvy.domain.tasks import Volume, VolumeKind
from cavvy.spec.fields.kinds import (
    EXPRESSION,
    EitherKind,
    FieldSpec,
    ListKind,
    ScalarKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    read_text,
    text_kind,
)
from cavvy.spec.fields.limits import inner_path
from cavvy.spec.fields.resources import DISK_SIZE
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode, describe

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_EXPORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):(/[^:]*)")
_OWN = (
    "/",
    "/proc",
    "/sys",
    "/dev",
    "/etc",
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/boot",
    "/run",
)
_WORDS = (
    "SOURCE:PATH such as data:/mnt/data, /scratch:/scratch or server:/export:/data, with :ro "
    "to read only"
)


def check_path(text: str) -> str:
    """Where the files shall be seen: a full path, or one within the working folder. Raises
    WrongValue.
    """
    path = text.strip()
    if not path.startswith("/"):
        return inner_path(path)
    return _full(path, "a volume there would hide the node's own files")


def check_folder(text: str) -> str:
    """A folder of the node. Raises WrongValue."""
    path = text.strip()
    if path.startswith("~"):
        raise WrongValue(f"{shown(text)}: ~ is the shell's", suggestion="write the path in full")
    if not path.startswith("/"):
        raise WrongValue(
            f"{shown(text)} is no full path",
            suggestion="what lies beside the task file belongs in `workdir`",
        )
    return _full(path, "")


def _full(path: str, reason: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or ":" in path:
        raise WrongValue(
            f"{shown(path)} is no plain path", suggestion="write it without .. and colons"
        )
    clean = "/" + "/".join(parts)
    if reason and clean in _OWN:
        raise WrongValue(
            f"{shown(path)} is the system's: {reason}",
            suggestion="name another folder, such as /data",
        )
    return clean


def _check_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise WrongValue(f"{shown(text)} is no volume's name", expected="letters, digits and . _ -")
    return text


def _check_export(text: str) -> str:
    if not _EXPORT.fullmatch(text.strip()):
        raise WrongValue(f"{shown(text)} is no NFS export", expected="SERVER:/EXPORT")
    return text.strip()


def _check_options(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._=,:-]+", text):
        raise WrongValue(
            f"{shown(text)} is no list of mount's options",
            expected="such as nfsvers=4.1,nconnect=8",
        )
    return text


def _read_short(node: ScalarNode) -> Volume:
    text = read_text(node).strip()
    rest, read_only = text, False
    for mode in (":ro", ":rw"):
        if text.endswith(mode):
            rest, read_only = text.removesuffix(mode), mode == ":ro"
    if "://" in rest:
        raise WrongValue(
            f"{shown(text)} is a URL", suggestion="write it as one of `inputs` or `outputs`"
        )
    source, colon, path = rest.rpartition(":")
    if not colon or not source or not path:
        raise WrongValue(f"{shown(text)} does not say what and where", expected=_WORDS)
    if source.startswith(("/", "~", ".")):
        return Volume(
            kind=VolumeKind.HOST,
            source=check_folder(source),
            path=check_path(path),
            read_only=read_only,
        )
    if ":" in source:
        return Volume(
            kind=VolumeKind.NFS,
            source=_check_export(source),
            path=check_path(path),
            read_only=read_only,
        )
    volume = Volume(
        kind=VolumeKind.NAMED,
        source=_check_name(source),
        path=check_path(path),
        read_only=read_only,
    )
    if not volume.path.startswith("/"):
        raise WrongValue(
            f"{shown(path)} is no full path, and a provider's volume needs one",
            suggestion=f"write /{path}",
        )
    return volume


def _read_flag(node: ScalarNode) -> bool:
    if not isinstance(node.value, bool):
        raise WrongValue(f"{describe(node)} is neither true nor false")
    return node.value


FLAG = ScalarKind(
    words="true or false", parse=_read_flag, schema={"anyOf": [{"type": "boolean"}, EXPRESSION]}
)
NAME = FieldSpec(
    name="name",
    kind=text_kind("a volume's name", _check_name, numbers=True),
    help="A volume of the provider by its own name or id: a cloud's disk, a cluster's persistent "
    "volume claim.",
    example="name: imagenet",
)
HOST = FieldSpec(
    name="host",
    kind=text_kind("a full path on the node", check_folder),
    help="A folder that the node has already: of the host, or of a file system that is mounted "
    "there.",
    example="host: /scratch",
)
NFS = FieldSpec(
    name="nfs",
    kind=text_kind("an export as SERVER:/EXPORT", _check_export),
    help="An NFS export. Where it is mounted already that is used; otherwise the node mounts it, "
    "which takes root.",
    example="nfs: nas.example.org:/export/data",
)
PATH = FieldSpec(
    name="path",
    kind=text_kind("a full path, or one within the working folder", check_path),
    help="Where the work sees it: a full path, or (`host` and `nfs`) one within the working "
    "folder.",
    example="path: /data",
    required=True,
)
READ_ONLY = FieldSpec(
    name="read_only",
    kind=FLAG,
    help="Whether the work may only read. Refused on a node that cannot make it so.",
    example="read_only: true",
    default="false",
)
SIZE = FieldSpec(
    name="size",
    kind=DISK_SIZE.kind,
    help="With `name`: make the volume with this size where there is none of that name. A bare "
    "number is GiB.",
    example="size: 200GB",
    default="it must exist",
)
TYPE = FieldSpec(
    name="type",
    kind=text_kind("a disk type or storage class by its provider's name, such as gp3", _check_name),
    help="With `size`: of which type it is made.",
    example="type: gp3",
    default="the provider's default",
)
KEEP = FieldSpec(
    name="keep",
    kind=FLAG,
    help="With `size`: `false` makes the volume anew for each attempt and removes it, and its "
    "files, at the end.",
    example="keep: false",
    default="true",
)
OPTIONS = FieldSpec(
    name="options",
    kind=text_kind("mount's options", _check_options),
    help="With `nfs`: options of mount.",
    example="options: nfsvers=4.1",
)
_KINDS = {"name": VolumeKind.NAMED, "host": VolumeKind.HOST, "nfs": VolumeKind.NFS}


def _build(table: SectionReader) -> Volume | None:
    field = table.find_one((NAME, HOST, NFS), "the volume")
    if field is None:
        return None
    kind = _KINDS[field.name]
    source, path, size = table.get(field), table.get(PATH), table.get(SIZE)
    table.reject_beside(field, () if kind is VolumeKind.NAMED else (SIZE, TYPE, KEEP))
    table.reject_beside(field, () if kind is VolumeKind.NFS else (OPTIONS,))
    if kind is VolumeKind.NAMED and table.has(TYPE) and not table.has(SIZE):
        table.wrong(
            TYPE,
            "`type` is of a volume that is made, and there is no `size`",
            suggestion="add `size`",
        )
    if kind is VolumeKind.NAMED and not table.get(KEEP, True) and not table.has(SIZE):
        table.wrong(KEEP, "a volume that is not kept is made for the work, and there is no `size`")
    if kind is VolumeKind.NAMED and path is not None and not path.startswith("/"):
        table.wrong(PATH, f"{shown(path)} is no full path, and a provider's volume needs one")
    if source is None or path is None:
        return None
    return Volume(
        kind=kind,
        source=source,
        path=path,
        read_only=table.get(READ_ONLY, False),
        size_gib=size,
        type=table.get(TYPE, ""),
        options=table.get(OPTIONS, ""),
        keep=table.get(KEEP, True),
    )


VOLUME_TABLE = SectionSpec(
    path="volumes",
    help="One volume as a table: exactly one of `name`, `host` and `nfs`, and the path.",
    fields=(NAME, HOST, NFS, PATH, READ_ONLY, SIZE, TYPE, KEEP, OPTIONS),
    build=_build,
    hints={
        "mount_path": "write `path`",
        "mount": "write `path`",
        "target": "write `path`",
        "instance_path": "write `host`",
        "host_path": "write `host`",
        "hostPath": "write `host`",
        "claim": "write `name`",
        "readOnly": "write `read_only`",
        "server": "write `nfs: SERVER:/EXPORT`",
    },
)
_SHORT: ScalarKind[Volume | None] = ScalarKind(
    words=_WORDS, parse=_read_short, schema={"type": "string"}
)
VOLUMES = ListKind(item=EitherKind(kinds=(_SHORT, VOLUME_TABLE)), single=True)


def check_volumes(
    table: SectionReader, field: FieldSpec[tuple[Volume | None, ...]]
) -> tuple[Volume, ...]:
    """The file's volumes; notes where two claim one path or one name is made twice in different
    sizes.
    """
    volumes = tuple(each for each in table.get(field, ()) if each)
    paths = [each.path for each in volumes]
    for path in dict.fromkeys(path for path in paths if paths.count(path) > 1):
        table.wrong(
            field, f"two volumes are to be seen under {path}", suggestion="change one of the paths"
        )
    return volumes
