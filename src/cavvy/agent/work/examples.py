"""What programs report beside numbers: pictures, sound, texts, tables and histograms. Each is some
bytes of a kind:

| kind | bytes |
|---|---|
| image | PNG, JPEG, GIF or WebP |
| audio | WAV, FLAC, Ogg or MP3 |
| text | UTF-8 |
| table | JSON: {"columns": [names], "rows": [[values]]} |
| histogram | JSON: {"edges": [n + 1 numbers], "counts": [n numbers]} |
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
import time

from ..config import BadConfig
from .protobuf import read_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..config import ConfigFields

KINDS = ("image", "audio", "text", "table", "histogram")
LARGEST = 1 << 20  # bytes of an example
LONGEST_TEXT = 32 << 10  # bytes of a text in an event file
MOST_BINS = 64
MOST_PARTS = 16  # examples of which parts have come
# What a rank may send: so much at once, and so much a second after that.
BURST_BYTES, BYTES_PER_S = 16 << 20, 128 << 10
PNG = b"\x89PNG\r\n\x1a\n"
PNG_END = b"IEND\xaeB`\x82"
_STRINGS = 8  # the field of a tensor's texts
_MOST_OF_TENSOR = 4  # pictures of one event
_DOUBLE, _FLOAT = 2, 1  # types of tensors
_LARGEST_NUMBER = 1e300


class ExampleBudget:
    """Limits how many bytes of examples a rank sends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left, self._at = float(BURST_BYTES), clock()

    def take(self, size: int) -> bool:
        """Return whether so many bytes may be sent now."""
        now = self._clock()
        self._left = min(BURST_BYTES, self._left + (now - self._at) * BYTES_PER_S)
        self._at = now
        if size > self._left:
            return False
        self._left -= size
        return True


class ExampleParts:
    """Puts examples together that programs send in several lines, each of which has a part."""

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {}  # by the key that the program chose

    def take(self, fields: ConfigFields) -> bytes | None:
        """Take a part; return the whole once it is there. Raises BadConfig."""
        key = fields.read("key", "str")
        try:
            part = base64.b64decode(fields.read("part", "str"), validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadConfig(f"`example.part` is no base64: {error}") from None
        parts = self._parts.setdefault(key, [])
        parts.append(part)
        if sum(map(len, parts)) > LARGEST:
            del self._parts[key]
            raise BadConfig(f"an example has more than {LARGEST} bytes")
        if not fields.read("more", "bool", False):
            return b"".join(self._parts.pop(key))
        while len(self._parts) > MOST_PARTS:
            del self._parts[next(iter(self._parts))]
        return None


def read_value(
    tag: str, fields: dict[int, int | bytes], plugin: bytes
) -> Iterator[tuple[str, str, bytes]]:
    """Yield what a value of an event file holds beside numbers: the name, the kind and the bytes.
    The fields are those of `Summary.Value` (tensorflow/core/framework/summary.proto). Raises
    ValueError, struct.error.
    """
    image, audio, histogram, tensor = (fields.get(number) for number in (4, 6, 5, 8))
    if isinstance(image, bytes):
        yield from _read_media(tag, "image", image)
    elif isinstance(audio, bytes):
        yield from _read_media(tag, "audio", audio)
    elif isinstance(histogram, bytes):
        yield from _read_histogram(tag, histogram)
    elif isinstance(tensor, bytes):
        if plugin == b"images":
            found = [each for each in _read_texts(tensor) if _is_whole(each)][:_MOST_OF_TENSOR]
            for number, data in enumerate(found):
                yield (tag if len(found) == 1 else f"{tag}/{number}"), "image", data
        elif plugin == b"text":
            name = tag[: -len("/text_summary")] if tag.endswith("/text_summary") else tag
            text = b"\n".join(_read_texts(tensor))[:LONGEST_TEXT]
            yield name, "text", text.decode("utf-8", "replace").encode()
        elif plugin == b"audio":
            for data in _read_texts(tensor)[:1]:
                if data.startswith(b"RIFF"):
                    yield tag, "audio", data
        elif plugin == b"histograms":
            yield from _read_bins(tag, tensor)


def _read_media(tag: str, kind: str, data: bytes) -> Iterator[tuple[str, str, bytes]]:
    encoded = dict(read_fields(data)).get(4)
    if isinstance(encoded, bytes) and _is_whole(encoded):
        yield tag, kind, encoded


def _is_whole(data: bytes) -> bool:
    """Whether a picture is none or whole. The checksum of a large record is not computed."""
    return data.endswith(PNG_END) if data.startswith(PNG) else data[:4] in _BEGINS


_BEGINS = (b"RIFF", b"GIF8", b"\xff\xd8\xff\xe0", b"\xff\xd8\xff\xe1")


def _read_texts(tensor: bytes) -> Sequence[bytes]:
    return [
        value
        for number, value in read_fields(tensor)
        if number == _STRINGS and isinstance(value, bytes)
    ]


def _read_histogram(tag: str, data: bytes) -> Iterator[tuple[str, str, bytes]]:
    """Read a `HistogramProto`: buckets by their upper limits."""
    fields = dict(read_fields(data))
    ends = [fields.get(1), fields.get(2)]
    low, high = (struct.unpack("<d", each)[0] if isinstance(each, bytes) else 0.0 for each in ends)
    limits, counts = _read_doubles(fields.get(6)), _read_doubles(fields.get(7))
    if not limits or len(limits) != len(counts):
        return
    edges = [low, *(min(max(each, low), high) for each in limits)]
    yield tag, "histogram", write_histogram(edges, counts)


def _read_bins(tag: str, tensor: bytes) -> Iterator[tuple[str, str, bytes]]:
    """Read the tensor of a histogram: rows of a left edge, a right edge and a count."""
    fields = dict(read_fields(tensor))
    content, kind = fields.get(4), fields.get(1)
    if not isinstance(content, bytes) or kind not in (_DOUBLE, _FLOAT):
        return
    form, size = ("d", 8) if kind == _DOUBLE else ("f", 4)
    count = min(len(content) // size // 3, 4096)
    numbers = struct.unpack(f"<{3 * count}{form}", content[: 3 * count * size])
    if count:
        edges = [numbers[0], *numbers[1::3]]
        yield tag, "histogram", write_histogram(edges, numbers[2::3])


def _read_doubles(data: object) -> Sequence[float]:
    if not isinstance(data, bytes) or len(data) % 8:
        return ()
    return struct.unpack(f"<{len(data) // 8}d", data)


def write_histogram(edges: Sequence[float], counts: Sequence[float]) -> bytes:
    """Return a histogram as JSON, with at most MOST_BINS bins of equal width; b"" if it has no
    finite numbers."""
    if not all(abs(each) <= _LARGEST_NUMBER for each in (*edges, *counts)):
        return b""  # NaN and infinity are no JSON
    if len(counts) > MOST_BINS:
        edges, counts = _merge(edges, counts)
    made = {
        "edges": [float(f"{each:.6g}") for each in edges],
        "counts": [float(f"{each:.6g}") for each in counts],
    }
    return json.dumps(made, separators=(",", ":")).encode()


def _merge(
    edges: Sequence[float], counts: Sequence[float]
) -> tuple[Sequence[float], Sequence[float]]:
    """Spread the counts over bins of equal width, by how much of each bin lies in them."""
    low, width = edges[0], (edges[-1] - edges[0]) / MOST_BINS
    if width <= 0:
        return [edges[0], edges[-1]], [sum(counts)]
    merged = [0.0] * MOST_BINS
    for begin, end, count in zip(edges, edges[1:], counts):  # noqa: B905  # Python 3.8
        first = min(MOST_BINS - 1, max(0, int((begin - low) / width)))
        last = min(MOST_BINS - 1, max(first, int((end - low) / width)))
        if first == last or end <= begin:
            merged[first] += count
            continue
        for number in range(first, last + 1):
            part = min(end, low + (number + 1) * width) - max(begin, low + number * width)
            merged[number] += count * max(0.0, part) / (end - begin)
    return [low + number * width for number in range(MOST_BINS + 1)], merged
