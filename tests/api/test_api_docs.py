"""Pages that are written from the program are as the program writes them, and every error code
is used.
"""

import re
from pathlib import Path

from cavvy.api import errors, reference
from cavvy.api.errors import CODES

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_errors_is_fresh() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text("utf-8")
    assert page == errors.reference(), "run: python -m cavvy.api.errors > docs/reference/errors.md"


def test_the_page_of_routes_is_fresh() -> None:
    page = (ROOT / "docs/reference/api.md").read_text("utf-8")
    assert page == reference.reference(), (
        "run: python -m cavvy.api.reference > docs/reference/api.md"
    )


def test_every_code_is_raised_somewhere() -> None:
    rooms = (ROOT / "src/cavvy/api", ROOT / "src/cavvy/server")
    source = "".join(path.read_text("utf-8") for room in rooms for path in room.rglob("*.py"))
    raised = set(re.findall(r'(?:Problem|Later)\(\s*"([a-z-]+)"', source))
    either = re.findall(r'Problem\("([a-z-]+)" if [^,]* else "([a-z-]+)"', source)
    given = re.findall(r"when=\{([^}]*)\}", source)
    raised |= {code for codes in given for code in re.findall(r'"([a-z-]+)"', codes)}
    assert raised | {code for codes in either for code in codes} == set(CODES)
