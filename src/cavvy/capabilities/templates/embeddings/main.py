"""Embeddings of a folder of texts, by which similar texts are found and drawn as a map.

    python main.py --texts FOLDER

Without a folder, the program first writes the chapters of Python's own manual to `texts`. Each
shard of files becomes one file of vectors; a later start computes only those that are missing.
`embed` needs no trained weights. To use a model, replace its lines by those of a library, for
example sentence-transformers' `SentenceTransformer(NAME).encode(texts)`.
"""

import argparse
import csv
import os
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from matplotlib.figure import Figure
from sklearn.feature_extraction.text import HashingVectorizer

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
RESULTS = Path("results")
WIDTH, WORDS = 256, 2**14
hashing = HashingVectorizer(n_features=WORDS, stop_words="english", ngram_range=(1, 2))
matrix = np.random.default_rng(0).standard_normal((WORDS, WIDTH), dtype=np.float32)


def embed(texts: list[str]) -> np.ndarray:
    """Return a vector of length 1 for each text: its hashed words and pairs of words, multiplied
    with a random matrix, which keeps the angles between texts (Johnson and Lindenstrauss).
    """
    vectors = hashing.transform(texts) @ matrix
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def make_shard(paths: list[Path], target: Path) -> None:
    """Embed these texts, unless their vectors are there already."""
    names = [path.stem for path in paths]
    if target.exists():
        with np.load(target) as saved:
            if saved["names"].tolist() == names:
                return
    began = time.monotonic()
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    vectors = embed(texts)
    half = target.with_name("half.npz")
    seconds, size = time.monotonic() - began, sum(map(len, texts))
    np.savez(half, names=names, vectors=vectors, seconds=seconds, letters=size)
    half.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=Path, default=Path("texts"))
    parser.add_argument("--shard", type=int, default=8, help="texts per shard")
    options = parser.parse_args()
    if options.texts == Path("texts"):
        options.texts.mkdir(exist_ok=True)
        for name, text in topics.items():
            (options.texts / f"{name}.txt").write_text(text, encoding="utf-8")
    paths = sorted(options.texts.glob("*.txt"))
    if len(paths) < 2:
        raise SystemExit(f"{options.texts} has {len(paths)} files *.txt; at least 2 are needed")
    FOLDER.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    groups = [paths[start : start + options.shard] for start in range(0, len(paths), options.shard)]
    files = [FOLDER / f"vectors-{options.shard}-{number:05}.npz" for number in range(len(groups))]
    print(f"{sum(file.exists() for file in files)} of {len(files)} shards are there", flush=True)
    for number, (group, file) in enumerate(zip(groups, files, strict=True), 1):
        make_shard(group, file)
        print(f'CAVVY_PROGRESS {{"done": {number}, "total": {len(files)}}}', flush=True)
    parts = [dict(np.load(file)) for file in files]
    names = [name for part in parts for name in part["names"].tolist()]
    vectors = np.concatenate([part["vectors"] for part in parts])
    np.save(RESULTS / "vectors.npy", vectors)
    alike = vectors @ vectors.T - 2 * np.eye(len(names), dtype=np.float32)
    nearest = alike.argmax(1)
    with open(RESULTS / "nearest.csv", "w", newline="", encoding="utf-8") as table:
        rows = csv.writer(table)
        rows.writerow(("text", "most similar text", "cosine"))
        rows.writerows(
            (name, names[other], f"{alike[row, other]:.4f}")
            for row, (name, other) in enumerate(zip(names, nearest, strict=True))
        )
    for row in np.argsort(-alike.max(1), kind="stable")[:10:2]:
        print(f"{names[row]} is close to {names[nearest[row]]} ({alike[row].max():.3f})")
    centred = vectors - vectors.mean(0)
    places = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    figure = Figure(figsize=(10, 8), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*places.T, s=8)
    for place, name in zip(places, names, strict=True):
        axes.annotate(name, place, fontsize=6)
    figure.savefig(RESULTS / "map.png")
    seconds = sum(float(part["seconds"]) for part in parts)
    millions = sum(int(part["letters"]) for part in parts) / 1e6
    price = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan"))
    print(
        f"cost: {seconds / millions:.3g} s and ${price / 3600 * seconds / millions:.3g} "
        "per million letters (`cavvy cost` has the bill)"
    )


if __name__ == "__main__":
    main()
