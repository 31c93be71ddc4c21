"""The section `checkpoint`: a folder whose files are kept when an attempt ends."""

from datetime import timedelta

from cavvy.domain.tasks import CheckpointPolicy
from cavvy.spec.fields.amounts import size_kind
from cavvy.spec.fields.kinds import (
    FieldSpec,
    ScalarKind,
    WrongValue,
    either,
    section,
    text_kind,
)
from cavvy.spec.fields.paths import inner_path
from cavvy.spec.fields.times import length_kind
from cavvy.spec.fields.urls import read_target
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode

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
)
CHECKPOINT = either(_FOLDER, lambda path: CheckpointPolicy(path=path), _TABLE)
