"""An account with managed endpoints behind a REST API, for the contract suite."""

from contextlib import suppress
from datetime import timedelta

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import Provider, ProviderContext, ProviderError
from cavvy.providers.contract.memory_cloud import make_node_endpoint
from cavvy.providers.contract.rest_cloud import RestPlace
from cavvy.providers.managed.endpoint_provider import EndpointProvider
from cavvy.providers.registry import check_settings, make_from


class EndpointPlace(RestPlace):
    """An endpoint is deleted in several steps, each of which a poll takes."""

    table: dict[str, Scalar]  # settings besides the address and the key

    def provider(self, installation: str, **table: Scalar) -> EndpointProvider:  # type: ignore[override]
        places = {"endpoint": self.api.url, "key_file": str(self.file)}
        settings = {**places, **self.api.settings, **self.table, **table}
        context = ProviderContext(
            installation=installation,
            home=self.home,
            settings=check_settings(self.manifest, settings),
            state=self.states[installation],
            node_endpoint=make_node_endpoint(),
            list_prices=self.list_prices,
            now=self.cloud.now,
        )
        made = self.make(context)
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
