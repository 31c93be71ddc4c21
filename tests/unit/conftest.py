"""The state folder of unit tests: one below pytest's folder, not that of who runs them."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def state_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Where a command of a test keeps what it has to, unless the test names a folder."""
    folder = tmp_path_factory.getbasetemp() / "state" / request.module.__name__
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAVVY_HOME", str(folder))
        yield
