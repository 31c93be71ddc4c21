"""No request of a user gets a 5xx, whatever its values are."""

from collections import Counter
from pathlib import Path

from tests.api.api_state import open_api
from tests.api.hostile_user import Routes, attack_routes


async def test_no_request_to_a_route_of_users_gets_a_5xx(tmp_path: Path) -> None:
    seen = Counter[int]()
    async with open_api("sqlite", tmp_path) as api:
        description = (await api.http.get("/v1/openapi.json")).json()
        count = 3 * len(Routes(description, 0))
        assert await attack_routes(api, count, 8, seen) == []
    assert seen[200] > count // 10  # many are good requests
