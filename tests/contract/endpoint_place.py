"""Managed endpoints for the contract suite: an account behind a REST API, and the rules that apply to
the endpoints of all clouds.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from cavvy.domain.tasks import Scalar, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.abilities import ReplicaRequest
from cavvy.providers.base import (
    GangState,
    NotFound,
    Provider,
    ProviderContext,
    ProviderError,
    QuotaTooSmall,
    TryAgain,
)
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace
from cavvy.providers.managed.endpoint_provider import EndpointProvider
from cavvy.providers.objections import list_objections, refuses_all
from cavvy.providers.registry import make_from
from cavvy.providers.vm.cloud import CloudFault


class EndpointPlace(RestPlace):
    """An endpoint is deleted in several steps, each of which a poll takes."""

    table: dict[str, Scalar]  # settings besides the address and the key

    def provider(self, installation: str, **table: Scalar) -> EndpointProvider:  # type: ignore[override]
        places = {"endpoint": self.api.url, "key_file": str(self.file)}
        settings = {**places, **self.api.settings, **self.table, **table}
        made = self.make(self.make_context(installation, settings))
        assert isinstance(made, EndpointProvider)
        self._providers.append(made)  # type: ignore[arg-type]  # only closed
        return made

    def make(self, context: ProviderContext) -> Provider:
        return make_from(self._package, context)

    async def settle(self) -> None:
        for _ in range(4):
            await self.wait(timedelta(seconds=45))
            for each in self._providers:
                # a provider that a restart of the server has closed takes no more calls
                with suppress(ProviderError, RuntimeError):
                    await each.gangs()

    def close(self) -> None:
        asyncio.run(self.settle())
        super().close()


class EndpointContract(RestContract):
    """One cloud's endpoints; each object of a replica is made by a call that takes a while."""

    creates: timedelta  # how long the cloud takes for what a replica needs, in the tests of this
    pause: timedelta  # until the launch is repeated: the second time it is made too early
    made_once: Sequence[str]  # the calls that make the objects of a replica
    quota: str  # what the cloud tells of a quota that is used up
    pages: str  # the start of the addresses of the cloud's pages
    task: TaskSpec  # which the cloud can serve
    bad: Mapping[str, object]  # fields that it cannot serve, besides a command and a low port

    def left(self, account: Any) -> list[object]:
        """The objects in the account."""
        return [*account.api.endpoints, *getattr(account.api, "models", ())]

    def name(self, account: Any) -> str:
        """The name of the only endpoint."""
        (key,) = account.api.endpoints
        return key if isinstance(key, str) else str(key[-1])

    async def test_a_replica_is_made_once_the_cloud_has_made_what_it_needs(
        self, account: Any
    ) -> None:
        """The launch is repeated until then, also by a restarted server."""
        account.api.creates = self.creates
        harness = account.harness()
        gang = await harness.spec("slow")
        for _ in range(2):
            with pytest.raises(TryAgain):
                await harness.ours.launch(gang)
            await account.wait(self.pause)
        assert account.billed() == 0
        harness.restart()
        await harness.ours.launch(gang)
        assert account.billed() == 1
        await account.settle()
        assert (await harness.one(gang.name)).state is GangState.RUNNING
        await harness.remove(gang.name)
        await account.settle()
        assert [account.api.calls.count(each) for each in self.made_once] == [1] * len(
            self.made_once
        )
        assert self.left(account) == []

    async def test_a_refused_deployment_leaves_nothing(self, account: Any) -> None:
        account.api.quota = 0
        harness = account.harness()
        with pytest.raises(QuotaTooSmall, match=self.quota):
            await harness.ours.launch(await harness.spec("refused"))
        await account.wait(timedelta(hours=2))
        await account.settle()
        assert self.left(account) == []

    async def test_any_body_reaches_the_container_once(self, account: Any) -> None:
        gang = await account.harness().running("called")

        def end() -> None:
            account.api.failures[self.name(account)] = "gone"

        await check_bodies(account.api, account.provider(gang.installation), gang.name, end)

    def test_what_an_endpoint_cannot_do_is_refused_with_the_page(self, account: Any) -> None:
        provider = account.provider("ours")
        assert refuses_all(provider) == ""
        assert list_objections(self.task, provider) == []
        assert self.task.service is not None
        service = replace(self.task.service, port=80)
        bad = replace(self.task, run="python serve.py", service=service, **self.bad)
        found = {each.field: each.reason for each in list_objections(bad, provider)}
        assert set(found) == {"run", "service.port", *self.bad}
        assert all(self.pages in each for each in found.values())


async def check_bodies(
    api: Any, provider: EndpointProvider, gang: str, end: Callable[[], object], status: int = 503
) -> None:
    """Each body reaches the container once, also if the reply is lost, and none once the endpoint
    was ended. The container's own `status` is its answer to the second body.
    """
    got: list[tuple[bytes, str]] = []

    def answer(body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        got.append((body, headers["content-type"]))
        if len(got) == 3:
            raise CloudFault(0, "no reply")
        return (200, b'{"sum": 3}') if len(got) == 1 else (status, b"no tea")

    api.container = answer
    assert await provider.answers(gang)
    request = ReplicaRequest(body=b"\x00\xff", headers={"content-type": "a/b", "x": "y"})
    first, second = [await provider.invoke(gang, request) for _ in range(2)]
    with pytest.raises(TryAgain):
        await provider.invoke(gang, request)
    end()
    assert not await provider.answers(gang)
    with pytest.raises(TryAgain):
        await provider.invoke(gang, request)
    with pytest.raises(NotFound):
        await provider.invoke("unknown", request)
    assert (first.status, first.body) == (200, b'{"sum": 3}')
    assert (second.status, second.body) == (status, b"no tea")
    assert got == [(b"\x00\xff", "a/b")] * 3
