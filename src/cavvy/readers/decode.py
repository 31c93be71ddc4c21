"""Decodes bytes by the extension of the file name. Bytes of unknown formats are returned
unchanged.
"""

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
    """Decode an image to an array (height, width, channels) with values from 0 to 255. For a grey
    image, the array has no dimension for channels.
    """
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))
