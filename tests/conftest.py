"""What all tests share, and what is different in CI.

There, property tests draw the same cases every time, so that a run can be repeated; and a test of real servers that
fails, or one of several ranks, has two more tries, because the machine is noisy. Each is listed in the run's summary:
a test that needs them again and again is a defect.

A run has an end: every try of a test has five minutes (`timeout` in pyproject.toml), and once `REMUDA_TEST_BUDGET_S`
seconds have passed since the run began, tests of real servers that have not begun are skipped, each saying so.
"""

import os
import signal
import time
from pathlib import Path

import pytest
import pytest_timeout
from hypothesis import settings
from tests.proofs import Notary, note
from xdist.scheduler import LoadScopeScheduling

# A shell starts what it puts into the background with these ignored, and every program that a test starts would
# inherit that.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)

ROOT = Path(__file__).resolve().parent.parent
REAL_SERVERS = ("tests/system/", "tests/contract/test_provider_", "tests/api/")
# Files with one of these in their names use servers that are brought up once, and stay in one process.
SHARED_SERVERS = ("kubernetes", "slurm", "aws", "join", "ssh", "_ray", "_data_")

# No case has a time limit of its own: the machine is noisy, and the test has one.
settings.register_profile("any", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "any")


def needs_real_servers(item: pytest.Item) -> bool:
    return item.path.relative_to(ROOT).as_posix().startswith(REAL_SERVERS)


def needs_ranks(item: pytest.Item) -> bool:
    """Several processes that wait for each other: on a machine that is busy otherwise one may come too late."""
    return item.path.relative_to(ROOT).as_posix().startswith("tests/train/")


def pytest_configure(config: pytest.Config) -> None:
    file = os.environ.get("REMUDA_PROOFS")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Notary(Path(file)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        note(item)
        if os.environ.get("CI") and (needs_real_servers(item) or needs_ranks(item)):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget, began = os.environ.get("REMUDA_TEST_BUDGET_S"), os.environ.get("REMUDA_TEST_BEGAN")
    if budget and began and needs_real_servers(item) and time.time() - float(began) > float(budget):
        pytest.skip(f"not run: the {float(budget):.0f} s of this run are used up; alone: make test ARGS={item.nodeid}")
    if getattr(item, "execution_count", 1) > 1:
        wind_up_again(item)


def wind_up_again(item: pytest.Item) -> None:
    """The time of another try: pytest-timeout sets its alarm once for all tries, and takes it away when one fails."""
    settings = pytest_timeout._get_item_settings(item)
    if settings.timeout and not settings.func_only:
        item.config.pluginmanager.hook.pytest_timeout_set_timer(item=item, settings=settings)


class ByServers(LoadScopeScheduling):
    """Hands out whole files, and all files that share servers to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        name = file.rsplit("/", 1)[-1]
        return next((shared for shared in SHARED_SERVERS if shared in name), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByServers:
    return ByServers(config, log)
