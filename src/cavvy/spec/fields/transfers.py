"""The `inputs`, `outputs`, `checkpoint` and `volumes` of a task file. Inputs are copied to each
node, outputs are copied from the nodes, the files of a checkpoint are kept when an attempt ends,
and volumes are mounted on each node.
"""

import re
from datetime import timedelta
from enum import StrEnum

from cavvy.domain.tasks import CheckpointPolicy, MountMode, Transfer, Volume, VolumeKind
from cavvy.spec.fields.amounts import DISK_SIZE, size_kind
from cavvy.spec.fields.kinds import (
    FLAG,
    FieldSpec,
    ListKind,
    ScalarKind,
    SectionReader,
    WrongValue,
    choice,
    either,
    matching,
    section,
    text_kind,
)
from cavvy.spec.fields.places import (
    check_folder,
    check_path,
    inner_path,
    read_place,
    read_source,
    read_target,
)
from cavvy.spec.fields.times import length_kind
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode

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


class InputMode(StrEnum):
    """The way in which an input reaches the node: as a copy that is made before the work starts, as
    a stream, or as a mounted bucket without or with a cache.
    """

    COPY = "copy"
    STREAM = "stream"
    MOUNT = "mount"
    CACHED = "cached"


_MOUNTED = {InputMode.MOUNT: MountMode.MOUNT, InputMode.CACHED: MountMode.CACHED}


_BUCKETS = ("s3://", "gs://", "az://")


def _build_input(table: SectionReader) -> Transfer | None:
    mode = table.get("mode")
    stream, mount = mode is InputMode.STREAM, _MOUNTED.get(mode)
    transfer = table.make(Transfer, stream=stream, mount=mount)
    if transfer and mount and not transfer.source.startswith(_BUCKETS):
        expected = f"`mode: {mount}` needs a bucket as the source ({', '.join(_BUCKETS)})"
        table.wrong("mode", expected, suggestion="delete `mode`, which copies the files")
    elif transfer and mount and re.search("%0|%1|%7F|%2e%2e", transfer.source, re.IGNORECASE):
        table.wrong("source", "a folder that is mounted has no control characters and no .. in it")
    if transfer and transfer.writable and not mount:
        message = "`writable` needs `mode: mount` or `mode: cached`"
        table.wrong("writable", message, suggestion="send results with `outputs`")
    if transfer and stream and "://" not in transfer.source:
        message = "`mode: stream` needs a URL as the source"
        table.wrong("mode", message, suggestion="delete `mode`")
    return transfer


def _build_output(table: SectionReader) -> Transfer | None:
    transfer = table.make(Transfer)
    if transfer and transfer.every is not None and "://" not in transfer.target:
        message = "`every` needs a URL as the target"
        table.wrong("every", message, suggestion="delete `every`")
    return transfer


_SIZE = FieldSpec(size_kind("a size such as 200GB"), to=("size_mib",))


_REGION = text_kind("a region such as us-east-1", str.strip)


_INPUT = section(
    "inputs",
    _build_input,
    source=FieldSpec(
        text_kind(
            "an absolute path such as /data/images, or a URL such as s3://bucket/images/",
            read_source,
        ),
        required=True,
    ),
    target=FieldSpec(
        text_kind(
            "a path within the working folder, such as data/images, or within the home folder, "
            "such as ~/.cache, or an absolute path",
            read_place,
        ),
        required=True,
    ),
    mode=FieldSpec(
        choice(
            InputMode,
            {
                "mount_cached": InputMode.CACHED,
                "download": InputMode.COPY,
                "pipe": InputMode.STREAM,
            },
        ),
        to=(),
    ),
    writable=FLAG,
    size=_SIZE,
    region=_REGION,
)


_OUTPUT = section(
    "outputs",
    _build_output,
    source=FieldSpec(
        text_kind("a path within the working folder such as data/images", inner_path), required=True
    ),
    target=FieldSpec(
        text_kind(
            "an absolute path such as /data/results, or a URL such as s3://bucket/results/",
            read_target,
        ),
        required=True,
    ),
    every=length_kind(timedelta(seconds=1)),
    size=_SIZE,
    region=_REGION,
)


INPUTS, OUTPUTS = ListKind(_INPUT), ListKind(_OUTPUT)


def check_mounts(table: SectionReader) -> None:
    """Add a problem if an output is in a mounted bucket, or if two inputs of which one is mounted
    have the same path."""
    inputs = table.get("inputs", ())
    mounted = [each.target.rstrip("/") for each in inputs if each.mount is not None]
    for each in table.get("outputs", ()):
        if any(f"{each.source}/".startswith(f"{target}/") for target in mounted):
            message = f"{each.source} is in a mounted bucket, which has these files already"
            hint = "delete the output, or write it to another folder"
            table.wrong("outputs", message, suggestion=hint)
    targets = [each.target.rstrip("/") for each in inputs]
    for target in dict.fromkeys(each for each in mounted if targets.count(each) > 1):
        message = f"two inputs have the path {target}"
        table.wrong("inputs", message, suggestion="use different paths")


_FOLDER = text_kind("a folder within the working folder, such as checkpoints", inner_path)


_LENGTH = length_kind(timedelta(seconds=1))


def _read_every(node: ScalarNode) -> tuple[timedelta | None, bool]:
    """Return the checkpoint interval (None if Cavvy chooses the interval), and whether Cavvy
    chooses the interval.
    """
    return (None, True) if node.text.strip() == "auto" else (_LENGTH.parse(node), False)


def _bucket(text: str) -> str:
    url = read_target(text)
    if not url.startswith(("s3://", "gs://", "az://")):
        raise WrongValue(
            f"{shown(text)} is not a bucket",
            suggestion="omit `storage` to keep checkpoints on the server",
        )
    return url


_TABLE = section(
    "checkpoint",
    lambda table: table.make(CheckpointPolicy),
    path=FieldSpec(_FOLDER, required=True),
    every=FieldSpec(
        ScalarKind(f"{_LENGTH.words}, or auto", _read_every, _LENGTH.schema), to=("every", "auto")
    ),
    size=FieldSpec(size_kind("a size such as 12GB"), to=("size_mib",)),
    step=length_kind(timedelta(milliseconds=1)),
    storage=text_kind("a bucket's URL such as s3://bucket/checkpoints", _bucket),
    region=_REGION,
)


CHECKPOINT = either(_FOLDER, lambda path: CheckpointPolicy(path=path), _TABLE)


def _check_export(text: str) -> str:
    check = matching(
        r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):(/[^:]*)",
        "is not an NFS export",
        expected="SERVER:/EXPORT",
    )
    return check(text.strip())


def _read_part(text: str) -> str:
    return "." if text.strip().rstrip("/") == "." else inner_path(text)


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


_KINDS = {
    "name": VolumeKind.NAMED,
    "host": VolumeKind.HOST,
    "nfs": VolumeKind.NFS,
    "folder": VolumeKind.FOLDER,
}


def _build(table: SectionReader) -> Volume | None:
    owner = table.find_one(tuple(_KINDS), "the volume")
    if not owner:
        return None
    kind, source = _KINDS[owner], table.get(owner)
    volume = table.make(Volume, kind=kind, source=source or "")
    if kind is not VolumeKind.NFS:
        table.reject_beside(owner, ("options",))
    is_of_home = volume is not None and volume.path.startswith("~/")
    if is_of_home and kind not in (VolumeKind.FOLDER, VolumeKind.NAMED):
        message = "a mounted folder cannot be in the home folder, which an image has for itself"
        table.wrong("path", message, suggestion="write an absolute path")
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


_VOLUME_TABLE = section(
    "volumes",
    _build,
    name=FieldSpec(text_kind("a volume's name", _check_name, numbers=True), to=()),
    host=FieldSpec(text_kind("an absolute path on the node", check_folder), to=()),
    nfs=FieldSpec(text_kind("an NFS export in the form SERVER:/EXPORT", _check_export), to=()),
    folder=FieldSpec(
        text_kind("a file or folder within the working folder, such as conf", _read_part), to=()
    ),
    path=FieldSpec(
        text_kind(
            "an absolute path, or a path within the working folder or, for `folder`, the home "
            "folder, such as ~/conf",
            read_place,
        ),
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
    either(text_kind(_WORDS, _read_short), lambda volume: volume, _VOLUME_TABLE), single=True
)


def check_volumes(table: SectionReader) -> None:
    """Add a problem if two volumes have the same path."""
    volumes = table.get("volumes", ())
    if any(each.kind is VolumeKind.FOLDER for each in volumes) and not table.has("workdir"):
        message = "a volume is a part of the working folder, but `workdir` is missing"
        table.wrong("volumes", message, suggestion="add `workdir: .`")
    paths = [each.path for each in volumes]
    for path in dict.fromkeys(path for path in paths if paths.count(path) > 1):
        table.wrong(
            "volumes",
            f"two volumes have the path {path}",
            suggestion="use different paths",
        )
