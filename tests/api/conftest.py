"""Fixtures of the API tests: one open application state for each kind of store."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.api_state import KINDS, Api, open_api


@pytest.fixture(params=KINDS)
async def api(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(request.param, tmp_path) as opened:
        yield opened
