"""Reads TFRecord files with tf.train.Example records, without TensorFlow: the framing of records,
checksums, and the part of protobuf that `Example` uses.
"""

import struct
from collections.abc import Iterator
from typing import Any

from cavvy.readers.files import RandomAccessFiles, list_shards


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of the data, rotated and offset as the TFRecord format requires."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecord:
    """Reads a file or a folder of *.tfrecord. With `check`, the checksums of the data are verified,
    which is slow in plain Python.
    """

    def __init__(self, path: str, *, check: bool = True, parsed: bool = True) -> None:
        self._files, self._check, self._parsed = (
            RandomAccessFiles(list_shards(path, ".tfrecord")),
            check,
            parsed,
        )
        self._places: list[tuple[int, int, int]] = []
        for number, shard in enumerate(self._files.paths):
            size, offset = shard.stat().st_size, 0
            while offset < size:
                head = self._files.read(number, offset, 12)
                length, crc = struct.unpack("<QI", head)
                if masked_crc(head[:8]) != crc:
                    raise ValueError(f"{shard} is damaged at byte {offset}")
                self._places.append((number, offset + 12, length))
                offset += 16 + length
            if offset != size:
                raise ValueError(f"{shard} ends within a sample: the file is damaged")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        number, offset, length = self._places[index]
        data = self._files.read(number, offset, length + 4)
        if self._check and masked_crc(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            raise ValueError(f"{self._files.paths[number]} is damaged at byte {offset}")
        return parse_example(data[:-4]) if self._parsed else data[:-4]


def parse_example(data: bytes) -> dict[str, list[bytes] | list[float] | list[int]]:
    """Decode an Example {features: map<name, bytes_list | float_list | int64_list>}."""
    found: dict[str, Any] = {}
    for _, features in _fields(data):
        for _, entry in _fields(features):
            pair = dict(_fields(entry))
            found[pair[1].decode()] = []  # A feature may have no value.
            for kind, values in _fields(pair.get(2, b"")):
                found[pair[1].decode()] = _values(kind, values)
    return found


def _values(kind: int, data: bytes) -> list[Any]:
    out: list[Any] = []
    for _, value in _fields(data):
        if kind == 1:
            out.append(value)
        elif kind == 2:  # floats of four bytes each, packed or repeated
            out += struct.unpack(f"<{len(value) // 4}f", value)
        elif isinstance(value, int):
            out.append(_signed(value))
        else:
            place = 0
            while place < len(value):
                number, place = _varint(value, place)
                out.append(_signed(number))
    return out


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        if tag & 7 == 0:
            value: Any
            value, place = _varint(data, place)
        else:
            size = {1: 8, 5: 4}.get(tag & 7)
            if size is None:
                if tag & 7 != 2:
                    raise ValueError(
                        "this record is not a tf.train.Example; open it with parsed=False"
                    )
                size, place = _varint(data, place)
            value, place = data[place : place + size], place + size
        yield tag >> 3, value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value, place, shift = value | (byte & 0x7F) << shift, place + 1, shift + 7
        if byte < 0x80:
            return value, place


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
