"""Pages that are written from the program are as the program writes them, and every error code
is used.
"""

import json
import re
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI

from cavvy.api import errors, reference
from cavvy.api.app import add_routes
from cavvy.api.errors import CODES
from cavvy.api.openapi import describe
from cavvy.client import REVISION
from cavvy.client.errors import FOR_PROGRAMS

# the revision of the routes, and the digest of what it has
ROUTES = (107, "cd84943b88819f22")
ROOT = Path(__file__).resolve().parents[3]


def test_the_page_of_errors_is_fresh() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text("utf-8")
    assert page == errors.reference(), "run: python -m cavvy.api.errors > docs/reference/errors.md"


def test_the_page_of_routes_is_fresh() -> None:
    page = (ROOT / "docs/reference/api.md").read_text("utf-8")
    assert page == reference.reference(), (
        "run: python -m cavvy.api.reference > docs/reference/api.md"
    )


def test_other_routes_have_another_revision() -> None:
    """By its revision, a command knows that a running server is too old for it."""
    app = FastAPI()
    add_routes(app)
    document = describe(app)
    paths, schemas = document["paths"], document["components"]["schemas"]
    lines = sorted(f"{method} {path}" for path, methods in paths.items() for method in methods)
    seen, new = set[str](), _find_schemas(paths)
    while new := new - seen:
        seen |= new
        new = set[str]().union(*(_find_schemas(schemas[name]) for name in new))
    lines += [f"{name} {sorted(schemas[name].get('properties', ()))}" for name in sorted(seen)]
    digest = sha256("\n".join(lines).encode()).hexdigest()[:16]
    assert (REVISION, digest) == ROUTES, "increase REVISION in client/client.py, and ROUTES here"


def _find_schemas(document: object) -> set[str]:
    return set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))


def test_commands_know_the_hint_that_is_not_for_their_users() -> None:
    assert CODES["invalid-request"].hint == FOR_PROGRAMS


def test_every_code_is_raised_somewhere() -> None:
    rooms = [ROOT / "src/cavvy" / each for each in ("api", "server", "capabilities")]
    source = "".join(path.read_text("utf-8") for room in rooms for path in room.rglob("*.py"))
    raised = set(re.findall(r'(?:Problem|Later)\(\s*"([a-z-]+)"', source))
    either = re.findall(r'Problem\("([a-z-]+)" if [^,]* else "([a-z-]+)"', source)
    given = re.findall(r"(?:when|type\[Exception\], str\]) ?= ?\{([^}]*)\}", source)
    raised |= {code for codes in given for code in re.findall(r'"([a-z-]+)"', codes)}
    assert raised | {code for codes in either for code in codes} == set(CODES)


def test_the_page_has_every_code_of_a_state_folder() -> None:
    rooms = [ROOT / "src/cavvy" / each for each in ("server", "capabilities")]
    source = "".join(path.read_text("utf-8") for room in rooms for path in room.rglob("*.py"))
    raised = set(re.findall(r'StateDirError\(\s*"([a-z-]+)"', source))
    _, _, table = errors.reference().partition("## A server that cannot start")
    assert raised == set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE))
