"""Fills in the command that an image itself names. A task's `run` contains `${{ image.command }}`
for the image's entry point with its arguments, and `${{ image.entrypoint }}` for the entry point
alone. The server fills both in if the image's registry answers it; otherwise the agent asks the
container engine.
"""

from __future__ import annotations

import re
import shlex

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LONGEST = 65536  # characters of a command; Linux passes at most twice as many in one argument
# In an image without an entry point, the words that follow are the command.
_WITHOUT_ENTRY = (
    'cd "$0" || exit; [ $# -gt 0 ] && exec "$@"; '
    'echo "the image names no entry point; write \\`run\\`" >&2; exit 127'
)
_MARK = re.compile(r"\$\{\{\s*image\.(command|entrypoint)\s*\}\}")


def names_own_command(run: str) -> bool:
    """Return whether shell commands contain an image's own command."""
    return _MARK.search(run) is not None


def fill_in_command(run: str, image: Mapping[str, object]) -> str:
    """Return the shell commands with the image's own command, which starts in the image's own
    folder. `image` is the part `config` of the image's configuration, as in the OCI image
    specification: lists of words at `Entrypoint` and `Cmd`, and a folder at `WorkingDir`
    (https://github.com/opencontainers/image-spec/blob/main/config.md). Raises ValueError if the
    image names no command.
    """
    entrypoint, arguments = _words(image, "Entrypoint"), _words(image, "Cmd")
    found = {"command": [*entrypoint, *arguments], "entrypoint": entrypoint}
    folder = str(image.get("WorkingDir") or "/")

    def write(match: re.Match[str]) -> str:
        words = found[match[1]]
        if not words and match[1] == "command":
            raise ValueError("the image names no command; write `run`")
        if "\0" in "".join([folder, *words]) or sum(map(len, words)) > _LONGEST:
            raise ValueError("the image names a command that cannot be run; write `run`")
        enter = 'cd "$0" && exec "$@"' if words else _WITHOUT_ENTRY
        return shlex.join(["sh", "-c", enter, folder, *words])

    return _MARK.sub(write, run)


def _words(image: Mapping[str, object], name: str) -> Sequence[str]:
    words = image.get(name)
    return [str(each) for each in words] if isinstance(words, list) else []
