"""The listener with which requests wait for changes."""

import asyncio

from cavvy.api.notifier import ChangeNotifier


async def test_a_listener_waits_again_after_a_wait_without_a_change() -> None:
    watch = ChangeNotifier()
    with watch.listen(["a"], 60.0) as listener:
        assert not await listener.wait(0.001)
        waiting = asyncio.create_task(listener.wait(60.0))
        await asyncio.sleep(0)
        watch.wake("a")
        assert await waiting
