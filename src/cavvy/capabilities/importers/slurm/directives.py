"""Reads the lines of #SBATCH of a batch script, with the names, units and forms of
https://slurm.schedmd.com/sbatch.html.
"""

import re
import shlex
from collections.abc import Collection, Iterator

from cavvy.capabilities.importers.script_lines import (
    MOST_CHARACTERS,
    DirectiveError,
    ScriptOption,
    split_words,
    take_line,
)
from cavvy.spec.problems import SourceMark

_MOST_DIGITS = 7  # of a part of a time; a larger one cannot be computed with
_MOST_LATE = 20  # lines that are named because they do not count
_PARTS = ("hetjob", "packjob")  # https://slurm.schedmd.com/heterogeneous_jobs.html
_LINE = re.compile(r"#SBATCH(?P<gap>\s+)(?P<words>.*)")


# the short form of each option that has one
SHORT = {
    **{"A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task"},
    **{"D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold"},
    **{"i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters"},
    **{"m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output"},
    **{"p": "partition", "Q": "quiet", "q": "qos", "S": "core-spec", "s": "oversubscribe"},
    **{"t": "time", "v": "verbose", "W": "wait", "w": "nodelist", "x": "exclude"},
}
# options without a value, or with one only after `=`
SWITCHES = split_words(
    "contiguous exclusive hold no-kill no-requeue requeue overcommit oversubscribe quiet "
    "spread-job use-min-nodes verbose wait get-user-env parsable ignore-pbs test-only reboot"
)


def read_options(text: str, unknown: Collection[str] = ()) -> Iterator[ScriptOption]:
    """Yield the options of a script in the order of their lines. As with sbatch, only lines before
    the first command count, and later lines of an option win. Those of `unknown`, which plug-ins of
    a cluster add, may lack a value. Raises DirectiveError.
    """
    left = MOST_CHARACTERS
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            return
        if found := _LINE.fullmatch(line):
            left = take_line(left, line, number)
            yield from _read_line(found["words"], number, found.start("words") + 1, unknown)


def list_late(text: str) -> Iterator[SourceMark]:
    """Yield the first lines of #SBATCH after the first command, which sbatch ignores."""
    begun, left = False, _MOST_LATE
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun or bool(line.strip() and not line.startswith("#"))
        if left and begun and _LINE.fullmatch(line):
            left -= 1
            yield SourceMark(line=number, column=1)


def _read_line(
    text: str, line: int, column: int, unknown: Collection[str]
) -> Iterator[ScriptOption]:
    mark = SourceMark(line=line, column=column)
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        message, expected = f"the line cannot be read: {error}", "quotes in pairs"
        raise DirectiveError(mark, message, expected) from None
    while words:
        word = words.pop(0)
        if word in _PARTS:
            message = "the job has parts with different nodes, and Cavvy's jobs have none"
            expected = "one part; `group` in Cavvy files starts several jobs together"
            raise DirectiveError(mark, message, expected)
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
        elif len(word) > 1 and word[0] == "-" and word[1] in SHORT:
            name, value = SHORT[word[1]], word[2:].removeprefix("=")
            given = "=" if value else ""
        else:
            message = f"{word!r} is no option of sbatch"
            raise DirectiveError(mark, message, "--NAME=VALUE, or a letter such as -N 2")
        is_free = name in unknown and (not words or words[0].startswith("-"))
        if not given and name not in SWITCHES and not is_free:
            if not words:
                raise DirectiveError(mark, f"--{name} has no value", f"--{name}=VALUE")
            value = words.pop(0)
        yield ScriptOption(name, value, mark)


def read_minutes(text: str) -> float | None:
    """Return a time limit in minutes, or None for no limit. The forms are M, M:S, H:M:S, D-H, D-H:M
    and D-H:M:S. Raises ValueError.
    """
    if text.lower() in ("infinite", "unlimited", "0", "-1"):
        return None
    days, dash, rest = text.partition("-")
    parts = (rest if dash else text).split(":")
    numbered = [*parts, *([days] if dash else [])]
    if len(parts) > 3 or not all(
        part.isdecimal() and len(part) <= _MOST_DIGITS for part in numbered
    ):
        raise ValueError(text)
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return int(days) * 1440 + hours * 60 + minutes + seconds / 60
    if len(numbers) == 3:
        return numbers[0] * 60 + numbers[1] + numbers[2] / 60
    return numbers[0] + (numbers[1] / 60 if len(numbers) == 2 else 0)


def read_mib(text: str) -> int:
    """Return a size of memory in MiB; without a unit, it is in MiB. Raises ValueError."""
    found = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(text)
    power = "KMGT".index(found[2].upper() or "M")
    return -(-int(found[1]) * int(1024**power) // 1024)


def read_gpus(text: str) -> tuple[str, int]:
    """Return the type, or "", and the number of GPUs in TYPE:NUMBER, TYPE or NUMBER. Raises
    ValueError.
    """
    kind, _, count = text.split("(")[0].rpartition(":")
    if not count.isdecimal():
        kind, count = (f"{kind}:{count}" if kind else count), "1"
    if not re.fullmatch(r"[\w.+-]*", kind):
        raise ValueError(text)
    return kind, int(count)
