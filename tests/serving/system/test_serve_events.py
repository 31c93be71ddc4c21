"""Queued calls and bucket events: each object once, though the server is killed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.event_calls import check_each_once, count_calls, put_objects, serve_reader
from tests.system.storages import servers, start_s3
from tests.system.trust import User, serving_user_at
from tests.waits import wait_until

pytestmark = pytest.mark.system
__all__ = ["servers"]
COUNT = 60


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with serving_user_at(tmp_path) as user:
        yield user


def test_each_object_has_one_result_though_the_server_is_killed(user: User, servers: Path) -> None:
    keys = start_s3(servers / "s3")
    put_objects(keys, "each", COUNT)
    serve_reader(user, keys, "each")
    check_each_once(user, "each", COUNT, kills=2)

    user.cli("queue", "purge", "reader", "--state", "done")
    put_objects(keys, "each", COUNT + 1)  # the same objects, and a new one
    wait_until(lambda: count_calls(user).get("done") == 1)
    [call] = user.json("queue", "list", "reader")
    assert call["object"] == f"s3://data/each/{COUNT}"
    body = '{"subject": "x", "data": {"url": "http://127.0.0.1:9/"}}'
    call_id = user.output("call", "reader", "--queue", "--id", "mine", "-d", body).strip()
    assert call_id == user.output("call", "reader", "--queue", "--id", "mine", "-d", body).strip()
    assert "another call" in user.cli("call", "reader", "--queue", "--id", "mine", "-d", "", code=1)
    user.cli("unserve", "reader")
