"""Which tests a tier runs: `--fast` those without servers, `--provider NAME` those of one provider.

Without either, a run takes every test.
"""

import json
import re

import pytest
from tests.spread import REAL_SERVERS, SECONDS, group_of

PURE = ("tests/unit/", "tests/contract/", "tests/sim/")
LONG_S = 25.0  # a file that took longer when it was last measured is left to `make test`


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--fast", action="store_true", help="only tests that need no server")
    group.addoption("--provider", metavar="NAME", help="only tests of this provider")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tier's tests in `items`."""
    provider = config.getoption("--provider")
    kept = items
    if config.getoption("--fast"):
        seconds: dict[str, float] = json.loads(SECONDS.read_text())
        kept = [item for item in items if is_fast(item.nodeid, seconds)]
    if provider is not None:
        kept = [item for item in kept if is_of(item, provider)]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept


def is_fast(nodeid: str, seconds: dict[str, float]) -> bool:
    """Whether a test is pure, or runs against what lives in its process, and its file is quick."""
    real = nodeid.startswith(REAL_SERVERS) and "test_provider_fake" not in nodeid
    short = seconds.get(group_of(nodeid), 0.0) <= LONG_S
    return nodeid.startswith(PURE) and not real and short and "postgres" not in nodeid


def is_of(item: pytest.Item, provider: str) -> bool:
    """Whether a test is in a file named after the provider, or proves a feature of it."""
    named = re.search(rf"_{re.escape(provider)}[_.]", item.nodeid.split("::", 1)[0])
    return bool(named) or any(mark.args[0][0] == provider for mark in item.iter_markers("proves"))
