"""Measures the CPU seconds of `cavvy --help` and of every `cavvy CMD --help`, also as multiples of
`python -c pass`.

    python benchmarks/cli_start.py

For comparison, on the same kind of machine SkyPilot 0.14.1 takes 1.29 s and dstack 0.22.5 0.99 s.
If `sky` or `dstack` is installed in this environment, it is measured too.
"""

import shutil

from measure import CAVVY, PYTHON, command_cpu_s, judge, median_of, record, table

from cavvy.cli.main import COMMANDS

BAR_S = 0.12


def main() -> None:
    python_s = median_of(lambda: command_cpu_s([PYTHON, "-c", "pass"]))
    rows = []
    for words in [[], *([name] for name in COMMANDS)]:
        cpu_s = median_of(lambda words=words: command_cpu_s([CAVVY, *words, "--help"]))
        rows.append(
            (
                " ".join(["cavvy", *words, "--help"]),
                cpu_s,
                cpu_s / python_s,
                BAR_S,
                judge(cpu_s, BAR_S),
            )
        )
    record(rows[0][0], rows[0][1], BAR_S, "CPU s")
    slowest = max(rows[1:], key=lambda row: row[1])
    record(f"{slowest[0]} (the slowest)", slowest[1], BAR_S, "CPU s")
    for peer in ("sky", "dstack"):
        if path := shutil.which(peer):
            cpu_s = median_of(lambda path=path: command_cpu_s([path, "--help"]))
            rows.append((f"{peer} --help", cpu_s, cpu_s / python_s, "-", "peer"))
    columns = ("command", "CPU s (median of 7)", "times python -c pass", "bar, CPU s", "")
    table(f"starting the CLI; python -c pass takes {python_s * 1000:.1f} ms of CPU", columns, rows)


if __name__ == "__main__":
    main()
