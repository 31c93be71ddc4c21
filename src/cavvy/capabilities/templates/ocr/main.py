"""Text recognition over a folder of pictures, with the share of letters that were read rightly.

    python main.py --pictures FOLDER

Without a folder, the program first draws pages from Python's own manual, slightly noisy, with their
true text beside them (`page-001.png` and `page-001.txt`). Each picture is a shard: its text becomes
one file, and a later start reads only the pictures that are missing. The models are in the wheel of
RapidOCR (Apache-2.0).
"""

import argparse
import csv
import os
import textwrap
import time
from difflib import SequenceMatcher
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from rapidocr_onnxruntime import RapidOCR

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
RESULTS = Path("results")


def draw_pages(folder: Path, pages: int) -> None:
    """Draw the beginnings of chapters, each with its text."""
    folder.mkdir(exist_ok=True)
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", 22)
    random = np.random.default_rng(0)
    for number, text in enumerate(list(topics.values())[:pages], 1):
        lines = textwrap.wrap(" ".join(text.replace("*", "").split()), 48)[2:8]
        page = Image.new("L", (700, 36 * len(lines) + 40), 255)
        for row, line in enumerate(lines):
            ImageDraw.Draw(page).text((24, 20 + 36 * row), line, font=font, fill=30)
        noisy = np.asarray(page, float) + random.normal(0, 12, (page.height, page.width))
        stem = folder / f"page-{number:03}"
        stem.with_suffix(".txt").write_text("\n".join(lines), encoding="utf-8")
        Image.fromarray(noisy.clip(0, 255).astype("uint8")).save(stem.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=Path, default=Path("pictures"))
    parser.add_argument("--pages", type=int, default=12, help="how many to draw without a folder")
    options = parser.parse_args()
    if options.pictures == Path("pictures"):
        draw_pages(options.pictures, options.pages)
    pictures = sorted(options.pictures.glob("*.png")) + sorted(options.pictures.glob("*.jpg"))
    if not pictures:
        raise SystemExit(f"{options.pictures} has no files *.png or *.jpg")
    FOLDER.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    files = [FOLDER / f"{picture.name}.txt" for picture in pictures]
    known = [file.exists() for file in files]
    print(f"{sum(known)} of {len(files)} pages are there", flush=True)
    read, began = RapidOCR(intra_op_num_threads=len(os.sched_getaffinity(0))), time.monotonic()
    rows, shares = [], []
    for number, (picture, file) in enumerate(zip(pictures, files, strict=True), 1):
        if not file.exists():
            found, _ = read(str(picture))
            half = file.with_suffix(".half")
            half.write_text("\n".join(text for _, text, _ in found or []), encoding="utf-8")
            half.replace(file)
        text, truth = file.read_text(encoding="utf-8"), picture.with_suffix(".txt")
        share = ""
        if truth.exists():
            true = "".join(truth.read_text(encoding="utf-8").split())
            said = "".join(text.split())
            alike = SequenceMatcher(None, true, said, autojunk=False).get_matching_blocks()
            shares.append(sum(block.size for block in alike) / max(len(true), len(said), 1))
            share = f"{shares[-1]:.4f}"
        rows.append((picture.name, share, text))
        print(f'CAVVY_PROGRESS {{"done": {number}, "total": {len(files)}}}', flush=True)
    seconds, fresh = time.monotonic() - began, known.count(False) / 1000
    with open(RESULTS / "texts.csv", "w", newline="", encoding="utf-8") as table:
        csv.writer(table).writerows([("picture", "share of right letters", "text"), *rows])
    print(f"{len(pictures)} pages read; {np.mean(shares or [np.nan]):.2%} of the letters are right")
    price = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan"))
    if fresh:
        print(
            f"cost: {seconds / fresh:.3g} s and ${price / 3600 * seconds / fresh:.3g} per 1,000 "
            "pages (`cavvy cost` has the bill)"
        )


if __name__ == "__main__":
    main()
