"""What the tests of clouds have in common whose start scripts are objects of their own, and whose
machines cannot be deleted while they are provisioned.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from cavvy.providers.base import TryAgain
from cavvy.providers.contract import LaunchFault


def check_crashed_script(account: Any, add_theirs: Callable[[], object]) -> None:
    """The script of a machine that was never made is deleted an hour later. Scripts of others, such
    as the script `theirs`, stay.
    """

    async def scenario() -> None:
        harness = account.harness()
        gang = await harness.spec("crashed")
        account.fail(0, LaunchFault.DROPPED)
        with pytest.raises(TryAgain):
            await harness.ours.launch(gang)
        add_theirs()
        await account.settle()
        other = await harness.running("other")
        harness.restart()
        for _ in range(12):
            await harness.ours.gangs()
            assert len(account.api.scripts) == 3
            await account.wait(timedelta(minutes=5))
        await harness.ours.gangs()
        assert len(account.api.scripts) == 2
        await harness.remove(other.name)

    asyncio.run(scenario())
    assert list(account.api.scripts) == ["theirs"]


def check_early_removal(account: Any) -> None:
    """A machine that is removed while it is provisioned is deleted once it runs."""
    account.api.holds_early = True

    async def scenario() -> None:
        harness = account.harness()
        gang = await harness.launched("early")
        await account.wait(timedelta(seconds=30))
        with pytest.raises(TryAgain, match="provisioning"):
            await harness.ours.remove(gang.name)
        await account.settle()
        await harness.ours.gangs()
        assert account.billed() == 0

    asyncio.run(scenario())
