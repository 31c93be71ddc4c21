"""`cavvy data`: converts training data to shards for fast random access."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.packages import extra_command

TRY_S, TRIED = 3.0, 2000  # limits of one measurement: its seconds, and its number of random samples


@click.group("data", cls=CommandGroup)
def command() -> None:
    """Prepare training data."""


@command.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
def convert(source: str, target: Path) -> None:
    """Convert SOURCE to shards in the folder TARGET, and measure the read rates before and after
    the conversion.

    SOURCE is FORMAT:PATH; FORMAT is webdataset, tfrecord, mds, parquet, hdf5, images, huggingface
    or litdata. Images are stored as pixels, which takes more space but needs no decoding. Training
    scripts read the result as mds:TARGET.
    """
    from cavvy.domain.units import format_count

    try:
        from cavvy.readers import open_samples
        from cavvy.readers.mds import write_shards
    except ModuleNotFoundError as error:
        raise CommandFailure(f"this needs {error.name}", extra_command("train")) from error
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CommandFailure(
            f"{target} exists and is not an empty folder", "choose another folder", exit_code=2
        )
    try:
        samples = open_samples(source)
        before = measure(samples)
        count = write_shards(_watched(samples), target)
        after = measure(open_samples(f"mds:{target}"))
    except (ValueError, OSError, ImportError) as error:
        hint = (
            "write FORMAT:PATH, such as images:pictures; `cavvy data convert --help` lists all "
            "formats"
        )
        raise CommandFailure(f"cannot convert {source}: {error}", hint, exit_code=2) from error
    size = sum(path.stat().st_size for path in target.iterdir())
    click.echo(f"wrote {format_count(count, 'sample')}, {size / 1e6:.1f} MB, to {target}")
    click.echo(
        f"random reads by one thread: {before:,.0f} samples/s before the conversion, "
        f"{after:,.0f} after it ({after / before:.1f} times as fast)"
    )


def measure(samples: Any) -> float:
    """Return the samples per second that one thread reads at random, measured after a warm-up."""
    order = random.Random(0).sample(range(len(samples)), min(len(samples), TRIED))
    if not order:
        raise ValueError("there are no samples")
    for index in order[:50]:
        samples[index]
    begun, read = time.perf_counter(), 0
    for index in order:
        samples[index]
        read += 1
        if time.perf_counter() - begun > TRY_S:
            break
    return read / max(time.perf_counter() - begun, 1e-9)


def _watched(samples: Any) -> Iterator[Any]:
    with click.progressbar(range(len(samples)), label="converting") as numbers:
        for index in numbers:
            yield samples[index]
