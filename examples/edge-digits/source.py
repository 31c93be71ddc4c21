"""Sends images to the model of a device, from a camera or from the files of a folder, and prints
the answers as JSON lines:

    python3 source.py --folder images               # needs pillow
    python3 source.py --camera 0 --every-s 1        # needs pillow and opencv-python-headless
"""

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

SIDE = 8  # pixels, as in the images of the training
PAUSE_S = 2.0  # after a device that does not answer
REFUSED = (400, 413, 422)  # the status of an image that the device will never take


def read_folder(folder: Path, every_s: float) -> Iterator[tuple[str, Any]]:
    """Yield the images of a folder, also those that come later; with `every_s` 0, only once."""
    seen: set[str] = set()
    while True:
        for path in sorted(each for each in folder.iterdir() if each.name not in seen):
            seen.add(path.name)
            try:
                yield path.name, Image.open(path).convert("L")
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                print(f"{path.name} is no image: {error}", file=sys.stderr)
        if not every_s:
            return
        time.sleep(every_s)


def read_camera(number: int, every_s: float) -> Iterator[tuple[str, Any]]:
    import cv2

    camera = cv2.VideoCapture(number)
    while True:
        good, frame = camera.read()
        if not good:
            sys.exit(f"camera {number} gives no image")
        yield (
            f"frame at {time.time():.1f}",
            Image.fromarray(cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY)),
        )
        time.sleep(every_s)


def ask(url: str, image: Any) -> tuple[list[float], str]:
    """Return the probabilities of the digits, and who answered."""
    pixels = [each / 255 for each in image.resize((SIDE, SIDE)).tobytes()]
    body = json.dumps({"instances": [pixels]}).encode()
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as reply:
        return json.load(reply)["predictions"][0], reply.headers["Cavvy-Answered-By"]


def ask_until_answered(url: str, image: Any) -> tuple[list[float], str] | None:
    """Return what `ask` does when the device answers again, or None if it refuses the image."""
    while True:
        try:
            return ask(url, image)
        except OSError as error:
            print(f"{url}: {error}", file=sys.stderr)
            if getattr(error, "code", 0) in REFUSED:
                return None
        time.sleep(PAUSE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1/models/digits:predict")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--folder", type=Path)
    source.add_argument("--camera", type=int)
    parser.add_argument("--every-s", type=float, default=0.0)
    options = parser.parse_args()
    images = (
        read_camera(options.camera, options.every_s)
        if options.folder is None
        else read_folder(options.folder, options.every_s)
    )
    for name, image in images:
        answer = ask_until_answered(options.url, image)
        if answer is None:
            continue
        row, by = answer
        digit = max(range(len(row)), key=row.__getitem__)
        told = {"image": name, "digit": digit, "certainty": round(row[digit], 3), "by": by}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
