"""The code that clouds with a REST API share: the account with its client and settings, and the
function that creates the provider.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import Manifest, ProviderContext
from cavvy.providers.vm.cloud import NAME_PREFIX, Cloud
from cavvy.providers.vm.keys import ApiKeySource, list_setting
from cavvy.providers.vm.provider import VmProvider
from cavvy.providers.vm.rest import Json, ReadError, RestClient, Sign


class RestAccount:
    """An account of a cloud: the settings, the clock, and the client of the API. If the API
    requires a token other than the key from `keys`, `read_key` returns this token. For `key_header`
    and `sign`, see `RestClient`. `close` also closes the clients in `others`.
    """

    def __init__(
        self,
        settings: Mapping[str, Scalar],
        now: Callable[[], datetime],
        keys: ApiKeySource,
        read_error: ReadError,
        *,
        read_key: Callable[[], str] | None = None,
        key_header: str = "",
        sign: Sign | None = None,
        others: Sequence[RestClient] = (),
    ) -> None:
        self.settings, self.now = settings, now
        self._keys, self._others = keys, others
        self._unknown: Sequence[str] = ()
        read = read_key or (lambda: keys.read(settings))
        self.api = RestClient(
            str(settings["endpoint"]), read, read_error, key_header=key_header, sign=sign
        )

    def close(self) -> None:
        for each in (self.api, *self._others):
            each.close()

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. The caller must first call `Cloud.offers`, which finds
        the unknown accelerators.
        """
        return self._keys.facts(self.settings, self._unknown)

    def note_unknown(self, names: Iterable[str]) -> Sequence[str]:
        """Store the names of accelerators that are not in the catalog; the method `identity` later
        reports these names. Return the names sorted and without duplicates.
        """
        self._unknown = sorted(set(names))
        return self._unknown

    def names(self, setting: str) -> Sequence[str]:
        """Return the values of a setting that contains a comma-separated list."""
        return list_setting(self.settings, setting)

    def allows(self, region: str) -> bool:
        """Return whether the setting `regions` contains the region, or is unset."""
        regions = self.names("regions")
        return not regions or region in regions


class RestCloud(Cloud, Protocol):
    """A cloud whose calls go through one account."""

    account: RestAccount


def make_provider(
    manifest: Manifest,
    context: ProviderContext,
    cloud: Callable[[Mapping[str, Scalar], Callable[[], datetime]], RestCloud],
) -> VmProvider:
    """Create the provider of a cloud. `cloud` creates the cloud from the settings and the clock."""
    made = cloud(context.settings, context.now)
    account = made.account
    return VmProvider(manifest, context, made, identity=account.identity, close=account.close)


def keep_ours(told: Sequence[Json], name: str = "name") -> Sequence[Json]:
    """Return the machines whose field `name` starts with Cavvy's prefix. Machines without this
    prefix must not be parsed, because the data of these machines can lack fields.
    """
    return [each for each in told if str(each.get(name)).startswith(NAME_PREFIX)]
