"""What all tests share.

In CI, property tests draw the same cases every time, so that a run can be repeated. Where
CAVVY_TEST_RERUNS says so (a whole run does), a test of real servers that fails, or one of several
ranks, is tried again, because the machine may be busy; `tests/verdict.py` counts these tries. Pure
tests are never tried again.

A test has five minutes (`timeout` in pyproject.toml), each further try of it half of that.
"""

import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import pytest_timeout
from hypothesis import settings
from tests.proofs import Notary, note
from tests.sent_reports import pytest_report_to_serializable
from tests.shared import GroupEnds
from tests.spread import PROCESSES, ByGroup, Watch, arrange, check_read, leaves_out, level_of
from tests.states import StateReport
from tests.verdict import Verdict, pytest_runtest_makereport

pytest_plugins = ("tests.fixtures",)
# hooks of all tests
__all__ = ["pytest_report_to_serializable", "pytest_runtest_makereport"]

# A shell starts what it puts into the background with these ignored, and every program that a test
# starts would inherit that.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(
            number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
        )

# PYTHONDONTWRITEBYTECODE, which images of Python often set, would keep pytest from caching the tests
# that it has rewritten: each process of a run would rewrite and compile the asserts of all tests.
# Tests themselves, and the programs that they start, still obey the variable.
OBEYED = sys.dont_write_bytecode
sys.dont_write_bytecode = False

# A process that a test forks would have gRPC's threads, whose errors end in its program's output.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

# Threads of NumPy and PyTorch that wait for work spin on a core that other processes need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

os.environ["TZ"] = "UTC"  # commands show local time
time.tzset()

# What collection makes lives until the end, so the garbage collector would walk through 25,000 tests
# again and again: a quarter of the CPU time of collection, and some of each test's.
gc.disable()
# Afterwards it looks at what 10,000 new objects have left, not 700: with the modules of a whole run in
# memory, its walks were an eighth of the CPU time of tests that compute.
THRESHOLD = 10_000

ROOT = Path(__file__).resolve().parent.parent

# No case has a time limit of its own: the machine is noisy, and the test has one.
settings.register_profile("any", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "any")

WITH_PROCESSES = (*PROCESSES, "api", "contract", "torch")


def may_be_disturbed(item: pytest.Item) -> bool:
    """Whether the test starts processes that wait for each other. On a machine that is busy
    otherwise, one of them may come too late.
    """
    return level_of(item.nodeid) in WITH_PROCESSES


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests and fixtures that are coroutines run in asyncio's loop (`anyio_mode` in
    pyproject.toml)."""
    return "asyncio"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GroupEnds())
    config.pluginmanager.register(StateReport())
    if hasattr(config, "workerinput"):  # one of several processes
        return
    proofs, seconds = os.environ.get("CAVVY_PROOFS"), os.environ.get("CAVVY_TEST_SECONDS")
    if proofs:
        config.pluginmanager.register(Notary(Path(proofs)))
    config.pluginmanager.register(Watch(Path(seconds) if seconds else None))
    reruns = os.environ.get("CAVVY_TEST_RERUNS_FILE")
    config.pluginmanager.register(Verdict(Path(reruns) if reruns else None))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return leaves_out(collection_path, config.option.markexpr) or None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    arrange(items)
    tries = int(os.environ.get("CAVVY_TEST_RERUNS", "0"))
    for item in items:
        note(item)
        if tries and may_be_disturbed(item):
            item.add_marker(pytest.mark.flaky(reruns=tries, reruns_delay=2))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(THRESHOLD)
    gc.enable()
    sys.dont_write_bytecode = OBEYED


def pytest_runtest_setup(item: pytest.Item) -> None:
    check_read(item)
    if getattr(item, "execution_count", 1) > 1:
        wind_up_again(item)


def wind_up_again(item: pytest.Item) -> None:
    """The time of another try: pytest-timeout sets its alarm once for all tries, and takes it away
    when one fails.

    It is half of the first one's, so that a test which hangs in each of them does not take a run's
    time.
    """
    settings = pytest_timeout._get_item_settings(item)
    if settings.timeout and not settings.func_only:
        shorter = settings._replace(timeout=settings.timeout / 2)
        item.config.pluginmanager.hook.pytest_timeout_set_timer(item=item, settings=shorter)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByGroup:
    return ByGroup(config, log)
