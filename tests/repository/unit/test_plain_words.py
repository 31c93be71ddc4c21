"""No text in the source hides its subject behind an indefinite pronoun."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3] / "src" / "cavvy"
HIDDEN = re.compile(r"\b(?:nobody|somebody|whoever|whatever|whom)\b", re.IGNORECASE)

# Files that still use these words. The list may only shrink.
ALLOWED = frozenset(Path(__file__).parents[2].joinpath("words_to_replace.txt").read_text().split())


def test_no_text_uses_a_pronoun_that_hides_its_subject() -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(words)
        for path in sorted(ROOT.rglob("*.py"))
        if (words := set(_find_words(path)))
    }
    assert {name: words for name, words in found.items() if name not in ALLOWED} == {}
    assert ALLOWED - found.keys() == set(), "remove these files from tests/words_to_replace.txt"


def _find_words(path: Path) -> Iterator[str]:
    source = path.read_text()
    if not HIDDEN.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from HIDDEN.findall(node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from HIDDEN.findall(token.string)
