"""`cavvy chat` and `cavvy call` to a service whose program fails say why they wait."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.trust import User, serving_user_at

pytestmark = pytest.mark.system
TASK = "{name: echo, run: exit 3, resources: {cpu: 0.1}, service: {replicas: {max: 1}}}"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with serving_user_at(tmp_path) as user:
        yield user


def test_commands_say_why_they_wait(user: User) -> None:
    user.cli("serve", user.task(TASK))
    # they look at the service after 5 s
    asked = [
        user.start("chat", "echo", "Good morning", "--timeout", "12"),
        user.start("call", "echo", "--timeout", "12"),
    ]
    for each in asked:
        said = each.communicate()[1]
        assert each.returncode == 1
        assert "still waiting; service echo is" in said
    user.cli("unserve", "echo")
