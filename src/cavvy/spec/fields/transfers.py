"""The `inputs` and `outputs` of a task file: what is copied to each node, and back."""

from datetime import timedelta
from enum import StrEnum

from cavvy.domain.tasks import Transfer
from cavvy.spec.fields.kinds import (
    FieldSpec,
    ListKind,
    SectionReader,
    SectionSpec,
    choice,
    hints_for,
    text_kind,
)
from cavvy.spec.fields.paths import check_path, inner_path
from cavvy.spec.fields.times import length_kind
from cavvy.spec.fields.urls import read_source, read_target


class InputMode(StrEnum):
    """How an input comes."""

    COPY = "copy"
    STREAM = "stream"


_HINTS = hints_for(
    {
        "write `source`": "from src url",
        "write `target`": "to dst mount",
        "write `source` and `target`": "path",
    }
)


def _build_input(table: SectionReader) -> Transfer | None:
    stream = table.get("mode") is InputMode.STREAM
    transfer = table.make(Transfer, stream=stream)
    if transfer and stream and "://" not in transfer.source:
        message = "only what comes from a URL is streamed"
        table.wrong("mode", message, suggestion="delete `mode`")
    return transfer


def _build_output(table: SectionReader) -> Transfer | None:
    transfer = table.make(Transfer)
    if transfer and transfer.every is not None and "://" not in transfer.target:
        message = "only what goes to a URL is sent while the work runs"
        table.wrong("every", message, suggestion="delete `every`")
    return transfer


_INPUT = SectionSpec(
    "inputs",
    "One thing to copy to each node before the work starts. Of a URL, what ends with / or is no "
    "object itself is a folder. Credentials stay at the control plane; see the guide on data.",
    (
        FieldSpec(
            "source",
            text_kind(
                "a full path such as /data/images, or a URL such as s3://bucket/images/",
                read_source,
            ),
            "What to copy.",
            "s3://bucket/images/",
            required=True,
        ),
        FieldSpec(
            "target",
            text_kind(
                "a path within the working folder such as data/images, or a full one", check_path
            ),
            "Where the work sees it.",
            "data/images",
            required=True,
        ),
        FieldSpec(
            "mode",
            choice(
                InputMode,
                {"mount": InputMode.COPY, "download": InputMode.COPY, "pipe": InputMode.STREAM},
            ),
            "`copy`: before the work starts. `stream`: the target is a pipe, which the work reads "
            "once while the data comes; a folder's files come one after another, by name.",
            "stream",
            "copy",
            to=(),
        ),
    ),
    _build_input,
    _HINTS,
)
_OUTPUT = SectionSpec(
    "outputs",
    "One thing to copy back after the work has ended. To a URL that ends with /, a file goes under "
    "its own name.",
    (
        FieldSpec(
            "source",
            text_kind("a path within the working folder such as data/images", inner_path),
            "What to copy.",
            "results",
            required=True,
        ),
        FieldSpec(
            "target",
            text_kind(
                "a full path such as /data/results, or a URL such as s3://bucket/results/",
                read_target,
            ),
            "Where to.",
            "s3://bucket/results/",
            required=True,
        ),
        FieldSpec(
            "every",
            length_kind(timedelta(seconds=1)),
            "Of a URL: send what has changed also while the work runs, every so often, and at its "
            "end however that comes: a failure, a stop, a preemption. Nothing is deleted there.",
            "1m",
        ),
    ),
    _build_output,
    _HINTS,
)
INPUTS, OUTPUTS = ListKind(_INPUT), ListKind(_OUTPUT)
