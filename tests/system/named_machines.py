"""The life of a named machine at a provider: jobs share its gang, and it ends when it is idle."""

from collections.abc import Callable
from typing import Any

from tests.system.trust import User, wait_until


def play_machine(user: User, task: str, count_gangs: Callable[[], int]) -> None:
    """Get a machine for the resources of `task`, use it again, also after a restart of the server,
    and let it end by itself. `count_gangs` counts the gangs that were ever launched there.
    """
    before = count_gangs()
    path = user.task(f"{{name: one, machine: dev, keep: 10m, {task}, run: hostname}}")
    host = user.cli("run", "--yes", path).splitlines()[0]
    first = find_machine(user, "idle")
    assert first["rate_micros_per_hour"] > 0
    assert first["kept_until"] is not None
    assert user.cli("run", "--machine", "dev", "--", "hostname").splitlines()[0] == host
    user.cli("server", "stop")
    assert user.cli("run", "--machine", "dev", "--", "hostname").splitlines()[0] == host
    second = find_machine(user, "idle")
    assert second["since"] == first["since"], "it is the same gang"
    assert second["spent_micros"] > first["spent_micros"]
    assert count_gangs() == before + 1
    assert "kept" in [each["kind"] for each in user.json("cost", "one")["charges"]]
    user.cli("machines", "stop", "dev")
    find_machine(user, "stopped")
    assert user.json("nodes") == []
    user.cli("machines", "start", "dev", "--yes")
    find_machine(user, "idle")
    assert count_gangs() == before + 2
    user.cli("machines", "keep", "dev", "1s")
    find_machine(user, "stopped")
    wait_until(lambda: not user.api.nodes())


def find_machine(user: User, state: str) -> dict[str, Any]:
    """Wait until the user's only machine has this state, and return its row."""
    rows: list[dict[str, Any]] = []

    def is_there() -> bool:
        rows[:] = user.json("machines")
        return [each["state"] for each in rows] == [state]

    wait_until(is_there, lambda: f"no machine is {state}: {rows}")
    return rows[0]
