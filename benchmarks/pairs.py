"""What Cavvy adds to an engine's own way from a submission to the running program: alternating
pairs, one table.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

from measure import table

from cavvy.client import Client

WAIT_S = 60.0
PROGRAM = "cat /proc/uptime"  # reports when it began by the machine's clock, in steps of 10 ms


def make_parser(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20)
    return parser


def now_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def cavvy_s(client: Client, resources: str) -> float:
    """From before the client's call to the program's first moment; returns when the job has
    ended.
    """
    began = now_s()
    name = client.submit(f"{{name: t, resources: {resources}, run: {PROGRAM}}}").name
    for _ in client.follow("default", name):
        pass
    said = b"".join(client.logs("default", name)).decode()
    return float(said.split()[0]) - began


def compare(
    what: str,
    plain: Callable[[int], float],
    ours: Callable[[int], float],
    calm: Callable[[], None],
    *,
    pairs: int,
) -> None:
    """Measure in turn and print; the first pair is a warm-up, since it places the agent, and does
    not count.
    """
    engine, cavvy = [], []
    for number in range(pairs + 1):
        one = plain(number)
        calm()
        other = ours(number)
        calm()
        if number:
            engine.append(one)
            cavvy.append(other)
    added = [b - a for a, b in zip(engine, cavvy, strict=True)]
    values = ((what, engine, ""), ("Cavvy", cavvy, ""), ("added by Cavvy", added, "0.5"))
    rows = [(name, statistics.median(v), min(v), max(v), bar) for name, v, bar in values]
    table(
        f"submission to running program, s, {pairs} pairs",
        ("what", "median", "least", "most", "bar"),
        rows,
    )
