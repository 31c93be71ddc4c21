"""Divides the chunks of a log into lines."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cavvy.client import LogChunk


def read_lines(chunks: "Iterable[LogChunk]") -> Iterator[list[str]]:
    """For each chunk, yield the lines that the chunk completes, without line ends. Bytes that are
    not UTF-8 become U+FFFD. The last line of an attempt or of the log is yielded even if it is
    incomplete.
    """
    rest, attempt = b"", None
    for chunk in chunks:
        found = []
        if rest and chunk.attempt != attempt:
            found, rest = [_text(rest)], b""
        *lines, rest = (rest + chunk.data).split(b"\n")
        attempt = chunk.attempt
        if found := found + [_text(line) for line in lines]:
            yield found
    if rest:
        yield [_text(rest)]


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").removesuffix("\r")
