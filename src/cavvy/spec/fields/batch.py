"""The section `batch`: the rows that a function or a command processes, in shards."""

import re
from enum import StrEnum

from cavvy.domain.values import Struct
from cavvy.spec.fields.kinds import (
    FieldSpec,
    WrongValue,
    choice,
    section,
    text_kind,
    whole,
)
from cavvy.spec.fields.places import inner_path, read_source, read_target
from cavvy.spec.problems import shown

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class RowFormat(StrEnum):
    """The format of the input."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    WEBDATASET = "webdataset"
    IMAGES = "images"


class BatchKeys(Struct, frozen=True, kw_only=True):
    """The keys of a batch, which becomes an array of jobs. `input` is a path in the working folder,
    an absolute path or a URL. `rows` is the maximum of a shard, and `workers` the number of jobs.
    """

    input: str
    output: str
    function: str = ""
    format: str = ""
    rows: int = 1000
    workers: int = 4
    region: str = ""


def _read_input(text: str) -> str:
    clean = text.strip()
    return read_source(text) if "://" in clean or clean.startswith("/") else inner_path(text)


def _read_output(text: str) -> str:
    clean = text.strip()
    if clean.startswith("/") or "://" in clean:
        return read_target(text).rstrip("/") or "/"
    raise WrongValue(
        f"{shown(text)} is not an absolute path",
        suggestion="write the absolute path of a folder that all nodes share, or a bucket's URL",
    )


def _read_function(text: str) -> str:
    if not _FUNCTION.fullmatch(text.strip()):
        hint = "for embed.py with the function `run`, write embed:run"
        raise WrongValue(f"{shown(text)} does not name a function", suggestion=hint)
    return text.strip()


BATCH = section(
    "batch",
    lambda table: table.make(BatchKeys),
    input=FieldSpec(
        text_kind(
            "a file or folder of the working folder, an absolute path, or a URL", _read_input
        ),
        required=True,
    ),
    output=FieldSpec(
        text_kind(
            "an absolute path such as /data/results, or a URL such as s3://bucket/out", _read_output
        ),
        required=True,
    ),
    function=text_kind("a function such as embed:run", _read_function),
    format=choice(RowFormat, {"json": RowFormat.JSONL, "tar": RowFormat.WEBDATASET}),
    rows=whole(1, 1_000_000),
    workers=whole(1, 1000),
    region=text_kind("a region such as us-east-1", str.strip),
)
