"""The `checkpoint` of a task file: a folder that outlives an attempt."""

from datetime import timedelta

from cavvy.domain.tasks import CheckpointPolicy
from cavvy.domain.units import parse_memory_mib
from cavvy.spec.fields.kinds import (
    TEXT_OR_NUMBER,
    FieldSpec,
    ScalarKind,
    SectionSpec,
    WrongValue,
    either,
    hints_for,
    read_text,
    text_kind,
)
from cavvy.spec.fields.paths import inner_path
from cavvy.spec.fields.times import length_kind
from cavvy.spec.fields.urls import read_target
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode

_FOLDER = text_kind("a folder within the working folder such as checkpoints", inner_path)
_LENGTH = length_kind(timedelta(seconds=1))


def _read_every(node: ScalarNode) -> tuple[timedelta | None, bool]:
    """How often, and whether Cavvy chooses that."""
    return (None, True) if node.text.strip() == "auto" else (_LENGTH.parse(node), False)


def _read_size(node: ScalarNode) -> int:
    size = parse_memory_mib(read_text(node))
    if size <= 0:
        raise WrongValue(f"{shown(node.text)} is no size")
    return size


def _bucket(text: str) -> str:
    url = read_target(text)
    if not url.startswith(("s3://", "gs://", "az://")):
        raise WrongValue(
            f"{shown(text)} is no bucket",
            suggestion="leave `storage` out to keep them at the server",
        )
    return url


_TABLE = SectionSpec(
    "checkpoint",
    "A folder that outlives an attempt, and how often it is written.",
    (
        FieldSpec(
            "path", _FOLDER, "The folder, within the working folder.", "checkpoints", required=True
        ),
        FieldSpec(
            "every",
            ScalarKind(f"{_LENGTH.words}, or auto", _read_every, _LENGTH.schema),
            "How often the program means to write one; it is told so as CAVVY_CHECKPOINT_EVERY_S, "
            "and plans count with it. `auto`: Cavvy chooses, from what a checkpoint is measured to "
            "cost and how often nodes of that market are lost, and tells the program when it "
            "changes.",
            "10m",
            to=("every", "auto"),
        ),
        FieldSpec(
            "size",
            ScalarKind("a size such as 12GB", _read_size, TEXT_OR_NUMBER),
            "How large one checkpoint is expected to be: plans then say whether it can be saved "
            "within the notice that a place gives before it takes a node back.",
            "12GB",
            to=("size_mib",),
        ),
        FieldSpec(
            "step",
            length_kind(timedelta(milliseconds=1)),
            "How long the work takes from one place where it can save to the next, such as a step "
            "of training: plans add it to the time that the checkpoint takes when they say whether "
            "it fits into a notice.",
            "2s",
        ),
        FieldSpec(
            "storage",
            text_kind("a bucket's URL such as s3://bucket/checkpoints", _bucket),
            "Where checkpoints are kept: a folder of a bucket, which nodes write to by signed "
            "requests. Its keys are the server's or the project's secrets, as for inputs.",
            "s3://bucket/checkpoints",
            "the server's own folder",
        ),
    ),
    lambda table: table.make(CheckpointPolicy),
    hints_for({"write `path`": "dir folder", "write `every`": "interval"}),
)
CHECKPOINT = either(_FOLDER, lambda path: CheckpointPolicy(path=path), _TABLE)
