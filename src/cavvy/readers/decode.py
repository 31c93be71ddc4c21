"""From bytes to values, by the extension of a name; unknown ones stay bytes."""

import io
import json
from typing import Any

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm")


def decode(ending: str, data: bytes) -> Any:
    ending = ending.lower().rpartition(".")[2]
    if ending in ("txt", "text"):
        return data.decode()
    if ending in ("cls", "index", "inx", "id"):
        return int(data)
    if ending == "json":
        return json.loads(data)
    if ending == "npy":
        import numpy as np

        return np.load(io.BytesIO(data), allow_pickle=False)
    return decode_image(data) if ending in IMAGES else data


def decode_image(data: bytes) -> Any:
    """Height, width and, unless the image is grey, channels, with values of 0 to 255."""
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))
