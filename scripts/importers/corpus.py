"""Read a folder of other people's files as a user would, and print a table of how that went.

    python scripts/importers/corpus.py FOLDER [--csv FILE] [--verbose]

FOLDER has a folder for each kind of files. Its `index.tsv` names for each file, with tabs: its path
in FOLDER, the repository, the path there, its licence, and, by a person who has read the file, what
`cavvy` does with it now and did at first: right, clear (an error that says what Cavvy lacks), wrong
or different (something was left out without a word). Each file is validated, and converted twice;
what was written is read again. Files of the same folder that are not in the index lie beside it.
"""

import argparse
import contextlib
import csv
import io
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from click.testing import CliRunner

from cavvy.cli.main import cli

COLUMNS = ("file", "repository", "path", "licence", "now", "first")
VERDICTS = ("right", "clear", "wrong", "different")


def main() -> int:
    """Print the table. Returns 1 if a file is wrong, or ends in a traceback."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--csv", type=Path, help="write the list without the files")
    parser.add_argument("--verbose", action="store_true", help="also print what was said")
    options = parser.parse_args()
    rows = [*read_index(options.folder)]
    with tempfile.TemporaryDirectory() as home:
        os.environ["CAVVY_HOME"] = home
        for row in rows:
            row["seen"], said = try_file(options.folder / row["file"])
            if options.verbose or row["seen"] not in ("read", "refused"):
                print(f"{row['file']}: {row['seen']}\n{said}")
    if options.csv:
        write_list(options.csv, rows)
    print_table(rows)
    bad = ("traceback", "unstable", "lost")
    return int(any(row["seen"] in bad or row["now"] in ("wrong", "different") for row in rows))


def read_index(folder: Path) -> Iterator[dict[str, str]]:
    """Yield what the index says of each file."""
    with (folder / "index.tsv").open(encoding="utf-8") as file:
        for line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield dict(zip(COLUMNS, [*line, *[""] * len(COLUMNS)], strict=False))


def try_file(path: Path) -> tuple[str, str]:
    """Return what became of a file, in a word, and what was said."""
    with contextlib.chdir(path.parent):
        code, _, said = call("validate", path.name)
        first, second = (call("convert", path.name) for _ in range(2))
        if "Traceback" in said + first[2]:
            return "traceback", said + first[2]
        if first != second:
            return "unstable", first[2]
        if code or first[0]:
            return "refused", said or first[2]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=".", encoding="utf-8") as file:
            file.write(first[1])
            file.flush()
            again = call("convert", file.name)
        return ("read", said) if again[1] == first[1] else ("lost", again[2])


def call(*words: str) -> tuple[int, str, str]:
    """Return the exit code of a command, its output, and all that it said."""
    result = CliRunner().invoke(cli, words)
    output = result.output
    if result.exception and not isinstance(result.exception, SystemExit):
        trace = io.StringIO()
        print(f"Traceback: {result.exception!r}", file=trace)
        output += trace.getvalue()
    return result.exit_code, result.stdout, output


def write_list(path: Path, rows: list[dict[str, str]]) -> None:
    """Write where the files are from, and what became of them."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["kind", *COLUMNS[1:], "seen"])
        for row in rows:
            kind = row["file"].partition("/")[0]
            writer.writerow([kind, *(row[name] for name in COLUMNS[1:]), row["seen"]])


def print_table(rows: list[dict[str, str]]) -> None:
    """Print the number of files of each kind, and of each verdict."""
    kinds = list(dict.fromkeys(row["file"].partition("/")[0] for row in rows))
    print(
        "| kind | files | right | clear error | wrong | different | wrong or different at first |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in [*kinds, "all"]:
        own = [row for row in rows if kind in (row["file"].partition("/")[0], "all")]
        now, first = Counter(row["now"] for row in own), Counter(row["first"] for row in own)
        counts = [str(now[each]) for each in VERDICTS]
        counts.append(str(first["wrong"] + first["different"]))
        print(f"| {kind} | {len(own)} | {' | '.join(counts)} |")


if __name__ == "__main__":
    sys.exit(main())
