"""What programs report with `cavvy.log` beside numbers: pictures, sound, texts, tables and
histograms. They are turned into bytes here, with the libraries of the program alone.
"""

import io
import json
import os
import struct
import wave
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_BYTES = 1 << 20  # of an example; pictures are made smaller
_MOST_BINS = 64
_HALVINGS = 8
_CHANNELS = (1, 3, 4)  # of a picture: grey, RGB, RGB with alpha
_COLOURS = {1: 0, 3: 2, 4: 6}  # how PNG numbers them


class Picture:
    """A picture: of PIL, of matplotlib, an array of height × width (× channels), or a file or bytes
    of PNG, JPEG, GIF or WebP. `cavvy.log` takes the first three without this class, too.
    """

    kind = "image"

    def __init__(self, data: Any) -> None:
        self._data = data

    def encode(self) -> bytes:
        """Return PNG, or the bytes of the file. Raises TypeError, ValueError, OSError."""
        data = self._data
        if isinstance(data, (str, os.PathLike)):
            with open(data, "rb") as file:
                return file.read(MOST_BYTES + 1)
        if isinstance(data, bytes):
            return data
        for halvings in range(_HALVINGS):
            encoded = _encode_picture(data, 1 << halvings)
            if len(encoded) <= MOST_BYTES:
                break
        return encoded


class Audio:
    """Sound: samples from -1 to 1 (or whole numbers of 16 bits) at `rate` samples a second, as a
    list or an array with one dimension; or a file or bytes of WAV, FLAC, Ogg or MP3.
    """

    kind = "audio"

    def __init__(self, data: Any, rate: int = 16_000) -> None:
        self._data, self._rate = data, rate

    def encode(self) -> bytes:
        """Return WAV, or the bytes of the file. Raises TypeError, ValueError, OSError."""
        data = self._data
        if isinstance(data, (str, os.PathLike)):
            with open(data, "rb") as file:
                return file.read(MOST_BYTES + 1)
        if isinstance(data, bytes):
            return data
        samples = _to_list(data)
        if any(isinstance(each, float) for each in samples):
            samples = [32767 * min(1.0, max(-1.0, each)) for each in samples]
        whole = [min(32767, max(-32768, int(each))) for each in samples]
        made = io.BytesIO()
        with wave.open(made, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(self._rate)
            file.writeframes(struct.pack(f"<{len(whole)}h", *whole))
        return made.getvalue()


class Text:
    """A text, such as an answer of a language model."""

    kind = "text"

    def __init__(self, text: str) -> None:
        self._text = text

    def encode(self) -> bytes:
        """Return UTF-8. Raises TypeError, ValueError, OSError."""
        return str(self._text).encode("utf-8", "replace")


class Table:
    """A table: rows that are mappings by column, or lists in the order of `columns`; or a DataFrame
    of pandas. The first 1,000 rows and 50 columns are kept.
    """

    kind = "table"

    def __init__(self, rows: Any, columns: Sequence[str] | None = None) -> None:
        self._rows, self._columns = rows, columns

    def encode(self) -> bytes:
        """Return JSON. Raises TypeError, ValueError, OSError."""
        rows, columns = self._rows, self._columns
        if hasattr(rows, "itertuples"):
            columns = columns or [str(each) for each in rows.columns]
            rows = rows.itertuples(index=False)
        found: list[Any] = [each for _, each in zip(range(1000), rows, strict=False)]
        if columns is None:
            named = (name for each in found if isinstance(each, Mapping) for name in each)
            columns = [str(each) for each in dict.fromkeys(named)]
        cells = [
            [each.get(name) for name in columns] if isinstance(each, Mapping) else [*each]
            for each in found
        ]
        return json.dumps({"columns": [*columns], "rows": cells}, default=str).encode()


class Histogram:
    """A histogram of numbers: a list or an array of any shape. NaN and infinity are left out."""

    kind = "histogram"

    def __init__(self, values: Any, bins: int = _MOST_BINS) -> None:
        self._values, self._bins = values, min(max(1, bins), _MOST_BINS)

    def encode(self) -> bytes:
        """Return JSON. Raises TypeError, ValueError, OSError."""
        values = [each for each in map(float, _to_list(self._values)) if each - each == 0]
        if not values:
            raise ValueError("a histogram needs a finite number")
        low, high = min(values), max(values)
        width = (high - low) / self._bins or 1.0
        counts = [0] * self._bins
        for each in values:
            counts[min(self._bins - 1, int((each - low) / width))] += 1
        edges = [low + number * width for number in range(self._bins + 1)]
        return json.dumps({"edges": edges, "counts": counts}).encode()


Example = Picture | Audio | Text | Table | Histogram


def find_example(value: object) -> Example | None:
    """Return a value as an example, or None if it is none, such as a number."""
    if isinstance(value, Example):
        return value
    if hasattr(value, "itertuples"):
        return Table(value)
    shape = getattr(value, "shape", ())
    is_array = isinstance(shape, Iterable) and len([*shape]) in (2, 3)
    if hasattr(value, "savefig") or _is_pil(value) or is_array:
        return Picture(value)
    return None


def _is_pil(value: object) -> bool:
    return all(hasattr(value, name) for name in ("save", "mode", "resize"))


def _encode_picture(data: Any, divisor: int) -> bytes:
    """Return a picture as PNG, with a part of its width and height. Raises TypeError."""
    made = io.BytesIO()
    if hasattr(data, "savefig"):
        data.savefig(made, format="png", dpi=data.dpi / divisor)
        return made.getvalue()
    if _is_pil(data):
        if divisor > 1:
            data = data.resize([max(1, each // divisor) for each in data.size])
        if data.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I"):
            data = data.convert("RGB")
        data.save(made, format="PNG")
        return made.getvalue()
    return _encode_array(data, divisor)


def _encode_array(data: Any, divisor: int) -> bytes:
    import numpy as np

    if hasattr(data, "detach"):  # a tensor of PyTorch
        data = data.detach().float().cpu()
    array = np.asarray(data)
    if array.ndim == 3 and array.shape[0] in _CHANNELS and array.shape[-1] not in _CHANNELS:
        array = np.moveaxis(array, 0, -1)  # channels first
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[-1] not in _CHANNELS or not array.size:
        raise TypeError(f"an array of the shape {[*array.shape]} is no picture")
    array = array[::divisor, ::divisor]
    if array.dtype != np.uint8:
        array = np.nan_to_num(array.astype(np.float64))
        # numbers from 0 to 1, else from 0 to 255
        array = (array * (255 if array.max(initial=0) <= 1 else 1)).clip(0, 255).astype(np.uint8)
    height, width, channels = array.shape
    return encode_png(width, height, channels, np.ascontiguousarray(array).tobytes())


def encode_png(width: int, height: int, channels: int, data: bytes) -> bytes:
    """Return a picture of 8 bits a channel as PNG (https://www.w3.org/TR/png-3/)."""
    size = width * channels
    rows = b"".join(b"\0" + data[at : at + size] for at in range(0, height * size, size))
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(own)) + name + own + struct.pack(">I", zlib.crc32(name + own))
        for name, own in chunks
    )


def _to_list(data: Any) -> list[Any]:
    """Return the numbers of a list or an array."""
    if hasattr(data, "detach"):
        data = data.detach().float().cpu().reshape(-1)
    elif hasattr(data, "reshape"):
        data = data.reshape(-1)
    found = data.tolist() if hasattr(data, "tolist") else [*data]
    return found if isinstance(found, list) else [found]
