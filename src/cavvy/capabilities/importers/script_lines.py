"""What the lines of #SBATCH and #PBS in batch scripts have in common."""

from cavvy.domain.values import Struct
from cavvy.spec.problems import SourceMark

MOST_CHARACTERS = 1 << 16  # of all such lines of a script together: shlex is slow


class ScriptOption(Struct, frozen=True):
    """One option of a batch script; `value` is "" for a switch."""

    name: str
    value: str
    mark: SourceMark


class DirectiveError(ValueError):
    """A line that the batch system would refuse."""

    def __init__(self, mark: SourceMark, message: str, expected: str = "") -> None:
        super().__init__(message)
        self.mark, self.message, self.expected = mark, message, expected


def split_words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def take_line(left: int, line: str, number: int) -> int:
    """Return how many of the characters `left` there are after this line. Raises DirectiveError."""
    if len(line) > left:
        word, expected = line.split(maxsplit=1)[0], f"at most {MOST_CHARACTERS:,} characters"
        mark = SourceMark(line=number, column=1)
        raise DirectiveError(mark, f"the lines of {word} are too long together", expected)
    return left - len(line)
