"""A film is transcoded in segments by ffmpeg, and joined.

    python main.py --source film.mov

Without a source, ffmpeg first makes a film of its test pattern with a tone. Each segment is a shard
with its own file: workers encode several at a time, and a later start encodes only those that are
missing. The results are the film and a sheet of its pictures.
"""

import argparse
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from imageio_ffmpeg import count_frames_and_secs, get_ffmpeg_exe

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
RESULTS = Path("results")
FFMPEG = [get_ffmpeg_exe(), "-nostdin", "-v", "error", "-y", "-fflags", "+bitexact"]
EXACT = ["-flags", "+bitexact", "-map_metadata", "-1"]


def ffmpeg(*arguments: object, target: Path) -> None:
    """Run ffmpeg, and give its output its name once it is whole."""
    half = target.with_name(f"half-{target.name}")
    subprocess.run([*FFMPEG, *map(str, arguments), *EXACT, str(half)], check=True)
    half.replace(target)


def length(film: Path) -> float:
    """Return the seconds of the film's pictures."""
    try:
        return count_frames_and_secs(str(film))[1]
    except (RuntimeError, OSError) as error:
        raise SystemExit(f"{film} is not a film that ffmpeg can read: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, help="default: a test pattern")
    parser.add_argument("--seconds", type=float, default=60, help="of the test pattern")
    parser.add_argument("--segment", type=float, default=5, help="seconds of a segment")
    parser.add_argument("--crf", type=int, default=28, help="quality of H.264, lower is better")
    parser.add_argument("--height", type=int, default=360)
    options = parser.parse_args()
    if not (options.segment >= 0.5 and options.seconds >= 1):
        parser.error("--segment: at least 0.5 s, and --seconds: at least 1 s were expected")
    FOLDER.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    source = options.source or FOLDER / f"pattern-{options.seconds:g}.mkv"
    if options.source is None and not source.exists():
        picture = f"testsrc2=size=640x360:rate=25:duration={options.seconds}"
        tone = f"sine=frequency=440:duration={options.seconds}"
        codecs = ["-c:v", "mpeg4", "-q:v", "4", "-c:a", "pcm_s16le"]
        ffmpeg("-f", "lavfi", "-i", picture, "-f", "lavfi", "-i", tone, *codecs, target=source)
    total = length(source)
    starts = [options.segment * number for number in range(-int(-total // options.segment))]
    name = f"segment-{options.segment:g}-{options.crf}-{options.height}"
    files = [FOLDER / f"{name}-{number:05}.ts" for number in range(len(starts))]
    missing = [each for each in zip(starts, files, strict=True) if not each[1].exists()]
    print(f"{len(files) - len(missing)} of {len(files)} segments are there", flush=True)

    def encode(work: tuple[float, Path]) -> None:
        start, file = work
        cut = ["-ss", f"{start:.3f}", "-t", f"{options.segment:.3f}", "-i", source]
        video = ["-vf", f"scale=-2:{options.height}", "-c:v", "libx264", "-crf", options.crf]
        timing = ["-output_ts_offset", f"{start:.3f}", "-muxdelay", 0]
        ffmpeg(*cut, *video, "-threads", 1, "-an", *timing, target=file)

    began = time.monotonic()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, _ in enumerate(pool.map(encode, missing), len(files) - len(missing) + 1):
            print(f'CAVVY_PROGRESS {{"done": {number}, "total": {len(files)}}}', flush=True)
    seconds = time.monotonic() - began
    minutes = len(missing) / len(files) * total / 60
    listed = FOLDER / "segments.txt"
    listed.write_text("".join(f"file '{file.absolute()}'\n" for file in files))
    film, sheet = RESULTS / "film.mp4", RESULTS / "sheet.png"
    # The sound is encoded in one piece, because each piece would add some silence.
    sound = ["-i", source, "-map", "0:v", "-map", "1:a?", "-c:v", "copy", "-c:a", "aac"]
    ffmpeg("-f", "concat", "-safe", 0, "-i", listed, *sound, target=film)
    every = f"fps=12/{total:g},scale=160:-2,tile=4x3"
    ffmpeg("-i", film, "-vf", every, "-frames:v", 1, target=sheet)
    print(f"{length(film):.1f} s of film, {length(source):.1f} s of source")
    price = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan"))
    if missing:
        print(
            f"cost: {seconds / minutes:.3g} s and ${price / 3600 * seconds / minutes:.3g} per "
            "minute of film (`cavvy cost` has the bill)"
        )


if __name__ == "__main__":
    main()
