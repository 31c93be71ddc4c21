"""Queries all clusters of a provider at the same time, so that a silent cluster does not delay the
answers of the other clusters.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from cavvy.providers.base import GangSeen, PartlyUnknown, ProviderError, TryAgain

_T = TypeVar("_T")
# seconds to wait for one cluster; less than the control plane waits for `offers`
_PATIENCE_S = 15.0
# Seconds to wait for a cluster that did not answer the last query, so that it does not slow down
# every poll.
_BRIEF_S = 1.0


async def remove_from_all(asked: Iterable[Awaitable[bool]]) -> None:
    """Wait until the removal from every cluster has finished. Each removal concerns one cluster,
    and returns True if this cluster had the gang. Raises the first error if no cluster had the
    gang.
    """
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and (
            True not in answers or not isinstance(answer, ProviderError)
        ):
            raise answer


async def look_at_all(
    asked: Iterable[Awaitable[Sequence[GangSeen]]], name: str | None
) -> Sequence[GangSeen]:
    """Return the gangs of all clusters. If `name` is given, return as soon as a cluster reports
    this gang. If a cluster fails, raises PartlyUnknown with the gangs that the other clusters
    reported, or the first error if no gang was found.
    """
    looks = [asyncio.ensure_future(each) for each in asked]
    found: list[GangSeen] = []
    problem: ProviderError | None = None
    try:
        for look in asyncio.as_completed(looks):
            try:
                found += await look
            except ProviderError as error:
                problem = problem or error
            if name is not None and found:
                return found
    finally:
        for each in looks:
            each.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
    if problem is None:
        return found
    raise PartlyUnknown(str(problem), found) if found else problem


async def whoami_all(
    asked: Mapping[str, Callable[[], Coroutine[Any, Any, Sequence[tuple[str, str]]]]],
) -> Sequence[tuple[str, str]]:
    """Return the facts of each cluster that answers, and the problems of the other clusters.
    If no cluster answers, raises all problems as one error.
    """
    parts = FanOut[Sequence[tuple[str, str]]]()
    try:
        told = await parts.ask(asked)
    finally:
        await parts.close()
    return [
        *(fact for facts in told.values() for fact in facts),
        *(("silent", problem) for problem in parts.silent),
    ]


class FanOut(Generic[_T]):
    """Sends queries to all clusters of a provider, collects their answers, and reports the clusters
    that did not answer. A FanOut sends one kind of query, possibly several times.
    """

    def __init__(self) -> None:
        self._asking: dict[str, asyncio.Task[_T | ProviderError]] = {}
        self._problems: dict[str, ProviderError] = {}

    @property
    def silent(self) -> Sequence[str]:
        """The clusters that did not answer the last query, each with the reason."""
        told = {name: str(problem) for name, problem in self._problems.items()}
        return [
            text if text.startswith(f"{name}: ") else f"{name}: {text}"
            for name, text in told.items()
        ]

    async def ask(
        self, parts: Mapping[str, Callable[[], Coroutine[Any, Any, _T]]]
    ) -> dict[str, _T]:
        """Return the answers by cluster name. If no cluster answers, raises all problems as one
        error.
        """
        asked = {name: self._ask(name, ask) for name, ask in parts.items()}
        usual = [task for name, task in asked.items() if name not in self._problems]
        slow = [task for name, task in asked.items() if name in self._problems]
        for tasks, patience_s in ((usual, _PATIENCE_S), (slow, _BRIEF_S)):
            if tasks:
                await asyncio.wait(tasks, timeout=patience_s)
        answers: dict[str, _T] = {}
        for name, task in asked.items():
            answer = self._hear(name, task)
            if isinstance(answer, ProviderError):
                self._problems[name] = answer
            else:
                self._problems.pop(name, None)
                answers[name] = answer
        if parts and not answers:
            raise self._sum_up([self._problems[name] for name in parts])
        return answers

    def _sum_up(self, problems: Sequence[ProviderError]) -> ProviderError:
        """Combine all problems into one error, which is TryAgain if any of the problems is
        TryAgain."""
        worst = next(
            (problem for problem in problems if isinstance(problem, TryAgain)), problems[0]
        )
        return worst if len(problems) == 1 else type(worst)("; ".join(self.silent))

    def _ask(
        self, name: str, ask: Callable[[], Coroutine[Any, Any, _T]]
    ) -> "asyncio.Task[_T | ProviderError]":
        """Return the unanswered query to a cluster, or start a new query. If the last answer
        arrived after the time limit, discard this answer and send a new query.
        """
        task = self._asking.get(name)
        if task is not None and not task.done():
            return task
        answered = task is not None and not task.cancelled() and task.exception() is None
        if task is not None and answered and not isinstance(task.result(), ProviderError):
            self._problems.pop(
                name, None
            )  # the answer arrived late, so the next query gets the full time limit again
        fresh = self._asking[name] = asyncio.create_task(_catch(ask()))
        return fresh

    def _hear(self, name: str, task: "asyncio.Task[_T | ProviderError]") -> _T | ProviderError:
        if not task.done():
            return self._problems.get(name) or TryAgain(
                f"{name}: no answer within {_PATIENCE_S:.0f} s"
            )
        # if another task is stored, a concurrent call has already taken the answer
        if self._asking.get(name) is task:
            del self._asking[name]
        return task.result()

    async def close(self) -> None:
        """Cancel all open queries."""
        tasks = list(self._asking.values())
        self._asking.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _catch(asked: Awaitable[_T]) -> _T | ProviderError:
    try:
        return await asked
    except ProviderError as problem:
        return problem
