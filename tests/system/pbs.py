"""Users whose jobs run on the stand-in for PBS."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.contract import pbs_stand_in
from tests.system.trust import User, user_at


@contextmanager
def user_on_pbs(folder: Path) -> Iterator[User]:
    """A user of a cluster of their own; jobs that are left end after them."""
    with user_at(folder / "user") as user:
        user.variables.update(pbs_stand_in.install(folder / "pbs"))
        user.settings(
            f'[providers.local]\nenabled = false\n[providers.pbs]\nfolder = "{user.root}/shared"\n'
        )
        yield user
    for number in list_jobs(user):  # only now is no server left to launch them again
        pbs_stand_in.end_all(number)


def list_jobs(user: User, *states: str) -> list[str]:
    """The numbers of the jobs in these states; of those that are not over, where none is named."""
    with pbs_stand_in.cluster(user.root.parent / "pbs") as state:
        return [
            number
            for number, job in state["jobs"].items()
            if job["state"] in (states or ("Q", "R", "E"))
        ]
