"""Compares the time from a submission to the running program between Cavvy and an engine such as
Kubernetes, in alternating pairs.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

from measure import table

from cavvy.client import ApiClient

WAIT_S = 60.0
# reports when the program began, by the machine's clock in steps of 10 ms
PROGRAM = "cat /proc/uptime"


def make_parser(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20)
    return parser


def now_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def cavvy_s(client: ApiClient, resources: str) -> float:
    """The seconds from the client's call to the start of the program. Returns after the job has
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
    """Measure both in turn, and print a table. The first pair copies the agent to its place, so it
    is not counted.
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
