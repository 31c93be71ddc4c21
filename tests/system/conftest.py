"""Fixtures of tests with real servers: a user, a home whose server has run jobs, a database of
PostgreSQL, and servers that share one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.postgres import PostgresMissing, new_database
from tests.system.replica_site import ReplicaSite, replica_site
from tests.system.server_state import home_with_jobs
from tests.system.trust import User, user_at


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        yield user


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with home_with_jobs(tmp_path / "home") as folder:
        yield folder


@pytest.fixture
def url() -> str:
    try:
        return new_database()
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ReplicaSite]:
    try:
        with replica_site(tmp_path) as made:
            yield made
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")
