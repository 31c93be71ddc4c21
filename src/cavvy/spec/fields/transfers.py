"""The `inputs`, `outputs` and `checkpoint` of a task file. Inputs are copied to each node, outputs
are copied from the nodes, and the files of a checkpoint are kept when an attempt ends.
"""

import re
from datetime import timedelta
from enum import StrEnum

from cavvy.domain.tasks import CheckpointPolicy, MountMode, Transfer
from cavvy.spec.fields.amounts import size_kind
from cavvy.spec.fields.kinds import (
    FLAG,
    FieldSpec,
    ListKind,
    ScalarKind,
    SectionReader,
    WrongValue,
    choice,
    either,
    section,
    text_kind,
)
from cavvy.spec.fields.paths import check_path, inner_path
from cavvy.spec.fields.times import length_kind
from cavvy.spec.fields.urls import read_source, read_target
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode


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
            "a path within the working folder, such as data/images, or an absolute path", check_path
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
