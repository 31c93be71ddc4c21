"""Makes docs/img/demo.svg, the README's picture, from a real run of the demo in a new terminal.

Run it by hand if the demo looks different: `.venv/bin/python scripts/docs/picture.py`. The run
starts without any state, so it includes the task's setup. The picture shows the terminal
from `cavvy run` to the bill, without edits.
"""

import os
import pty
import re
import shutil
import struct
import sys
import termios
from fcntl import ioctl
from io import StringIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

_ROOT = Path(__file__).resolve().parents[2]
_PICTURE = _ROOT / "docs" / "img" / "demo.svg"
_COLUMNS, _ROWS = 100, 50
_EPOCHS = 180
_CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
# The template of `rich`, without a font from the network.
_TEMPLATE = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" xml:space="preserve">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: ui-sans-serif, "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: 18px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g>
</svg>
"""


def main() -> int:
    shutil.rmtree(_ROOT / ".cache" / "demo", ignore_errors=True)
    status, output = _record([str(_ROOT / "scripts" / "demo.sh")])
    if status:
        sys.stdout.write(output)
        return status
    lines = _screen(output)
    first = next(n for n, line in enumerate(lines) if line.plain.startswith("$ cavvy run"))
    last = next(n for n, line in enumerate(lines) if line.plain.startswith("3. "))
    _PICTURE.parent.mkdir(exist_ok=True)
    _PICTURE.write_text(_draw(lines[first:last]))
    print(f"wrote {_PICTURE.relative_to(_ROOT)}")
    return 0


def _record(command: list[str]) -> tuple[int, str]:
    """Run a command in a terminal. Returns its exit code and output."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {
            "TERM": "xterm-256color",
            "COLUMNS": str(_COLUMNS),
            "DEMO_EPOCHS": str(_EPOCHS),
        }
        os.execv(command[0], command)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    written = bytearray()
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the terminal closes with its last process
            break
        if not part:
            break
        written += part
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), written.decode("utf-8", "replace")


def _screen(output: str) -> list[Text]:
    """The final lines of a terminal with their colors. Supports only escape codes that the demo
    uses."""
    lines: list[dict[int, tuple[str, str]]] = [{}]
    row = column = at = 0
    style = ""
    while at < len(output):
        if found := _CODE.match(output, at):
            at = found.end()
            match found.groups():
                case ("0" | "", "m"):
                    style = ""
                case (_, "m"):
                    style += found.group()
                case (count, "A"):
                    row = max(0, row - int(count or 1))
                case (_, "K"):
                    lines[row] = {}
            continue
        char = output[at]
        at += 1
        if char == "\r":
            column = 0
        elif char == "\n":
            row += 1
            lines += [{}] * 0 if row < len(lines) else [{}]
        elif char.isprintable():
            lines[row][column] = style, char
            column += 1
    return [Text.from_ansi(_join(line)) for line in lines]


def _join(line: dict[int, tuple[str, str]]) -> str:
    """The cells of a line as text, with a code where the style changes: words stay whole, so that
    a search finds them in the picture."""
    cells = [line.get(column, ("", " ")) for column in range(max(line, default=-1) + 1)]
    groups = groupby(cells, key=itemgetter(0))
    texts = ((style, "".join(char for _, char in group)) for style, group in groups)
    return "".join(f"{style}{text}\x1b[0m" if style else text for style, text in texts)


def _draw(lines: list[Text]) -> str:
    console = Console(
        record=True, width=_COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in lines:
        console.print(line, no_wrap=True, highlight=False)
    return console.export_svg(
        title="cavvy", theme=DIMMED_MONOKAI, code_format=_TEMPLATE, unique_id="demo"
    )


if __name__ == "__main__":
    sys.exit(main())
