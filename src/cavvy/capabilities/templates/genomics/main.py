"""Reads of a genome are aligned by BWA, sorted and merged by samtools, and searched for variants.

    python main.py --reads 20000

The genome is that of the phage phiX174 (NC_001422.1, 5,386 bases, in `phix.fasta`), which
sequencers read as a control. The reads are simulated from it with errors and with five known
variants, so the result can be checked; replace `read_shard` by your FASTQ files. Each shard of
reads becomes one sorted BAM file, and a later start aligns only those that are missing.
"""

import argparse
import csv
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pysam
from matplotlib.figure import Figure
from pybwa import BwaIndex, BwaMem, BwaVerbosity, set_bwa_verbosity

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
RESULTS = Path("results")
GENOME = Path(__file__).with_name("phix.fasta")
NAME, LENGTH, ERRORS, BASES = "NC_001422.1", 100, 0.005, "ACGT"
VARIANTS = {500: "T", 1301: "A", 2222: "G", 3333: "T", 4801: "A"}  # by the position from 0


def read_shard(genome: str, reads: int, shard: int) -> list[pysam.FastxRecord]:
    """Return simulated reads of an individual that has the variants, half of them reversed."""
    mine = list(genome)
    for place, base in VARIANTS.items():
        mine[place] = base
    random = np.random.default_rng([174, shard])
    found = []
    for number, start in enumerate(random.integers(len(mine) - LENGTH, size=reads)):
        read = mine[start : start + LENGTH]
        for place in np.flatnonzero(random.random(LENGTH) < ERRORS):
            read[place] = BASES[random.integers(4)]
        text = "".join(read)
        if number % 2:
            text = text[::-1].translate(str.maketrans("ACGT", "TGCA"))
        found.append(
            pysam.FastxRecord(name=f"{shard}-{number}", sequence=text, quality="I" * LENGTH)
        )
    return found


def align(aligner: BwaMem, header: pysam.AlignmentHeader, reads: list, target: Path) -> None:
    """Write the alignments of the reads, sorted by their place."""
    unsorted = FOLDER / "unsorted.bam"
    with pysam.AlignmentFile(unsorted, "wb", header=header) as file:
        for hits in aligner.align(reads):
            for hit in hits:
                file.write(hit)
    pysam.sort("--no-PG", "-o", str(FOLDER / "half.bam"), str(unsorted))
    (FOLDER / "half.bam").replace(target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument("--shards", type=int, default=20)
    options = parser.parse_args()
    if not 1 <= options.shards <= options.reads:
        parser.error("a shard needs at least one read")
    FOLDER.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    set_bwa_verbosity(BwaVerbosity.ERROR)
    BwaIndex.index(GENOME, prefix=FOLDER / "genome")
    aligner = BwaMem(FOLDER / "genome")
    (genome,) = (record.sequence for record in pysam.FastxFile(str(GENOME)))
    header = pysam.AlignmentHeader.from_references([NAME], [len(genome)])
    each = options.reads // options.shards
    files = [FOLDER / f"reads-{each}-{number:05}.bam" for number in range(options.shards)]
    known = [file.exists() for file in files]
    print(f"{sum(known)} of {len(files)} shards are there", flush=True)
    began = time.monotonic()
    for number, file in enumerate(files):
        if not file.exists():
            align(aligner, header, read_shard(genome, each, number), file)
        print(f'CAVVY_PROGRESS {{"done": {number + 1}, "total": {len(files)}}}', flush=True)
    seconds, fresh = time.monotonic() - began, each * known.count(False) / 1e6
    merged = str(RESULTS / "all.bam")
    pysam.merge("-f", "--no-PG", merged, *map(str, files))
    pysam.index(merged)
    depth, rows = np.zeros(len(genome)), []
    with pysam.AlignmentFile(merged) as file:
        for column in file.pileup(stepper="all", max_depth=10**6, min_base_quality=0):
            counts = Counter(base.upper() for base in column.get_query_sequences() if base)
            depth[column.pos] = total = sum(counts.values())
            base, most = max(counts.items(), key=lambda pair: (pair[1], pair[0]), default=("", 0))
            if base != genome[column.pos] and total >= 10 and most / total > 0.8:
                rows.append((column.pos + 1, genome[column.pos], base, f"{most / total:.3f}"))
    with open(RESULTS / "variants.csv", "w", newline="") as table:
        csv.writer(table).writerows([("position", "reference", "read", "share"), *rows])
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(range(len(genome)), depth)
    axes.set(xlabel="position in phiX174", ylabel="reads", title="Coverage and variants (red)")
    for position, *_ in rows:
        axes.axvline(position, color="red")
    figure.savefig(RESULTS / "coverage.png")
    right = {position - 1 for position, *_ in rows}
    found, wrong = len(right & set(VARIANTS)), len(right - set(VARIANTS))
    print(f"coverage {depth.mean():.1f}; {found} of {len(VARIANTS)} variants, {wrong} others")
    price = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan"))
    if fresh:
        print(
            f"cost: {seconds / fresh:.3g} s and ${price / 3600 * seconds / fresh:.3g} per million "
            "reads (`cavvy cost` has the bill)"
        )


if __name__ == "__main__":
    main()
