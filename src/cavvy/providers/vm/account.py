"""The code that clouds with a REST API share: the account with its client and settings, and the
function that creates the provider.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Protocol, TypeVar

from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate, UnitError, parse_rate
from cavvy.providers.abilities import HAS_PARTS
from cavvy.providers.base import Manifest, ProviderContext
from cavvy.providers.settings import read_exchange_rate
from cavvy.providers.vm.cloud import NAME_PREFIX, Cloud
from cavvy.providers.vm.keys import ApiKeySource, list_setting
from cavvy.providers.vm.regions import ask_regions
from cavvy.providers.vm.rest import Json, ReadError, RestClient, Sign

if TYPE_CHECKING:
    from cavvy.providers.vm.provider import VmProvider

_T = TypeVar("_T")


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
        self.silent: Sequence[str] = ()  # the zones that did not answer, each with the reason
        self._currency, self._usd = read_exchange_rate(settings)
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
        known = list(self._keys.facts(self.settings, self._unknown))
        if self._currency == "USD":
            return known
        name = f"usd_per_{self._currency.lower()}"
        return [*known, ("prices", f"in {self._currency}, at ${self._usd:f} each (`{name}`)")]

    def rate(self, price: str | float | Decimal, hours: float | Decimal = 1) -> HourlyRate:
        """Convert a price for `hours` hours, in the currency that the manifest states, into a rate
        in USD. For example, `hours` is 1 / Decimal(60) for a price per minute. Raises UnitError.
        """
        try:
            amount = Decimal(str(price))
        except InvalidOperation:
            raise UnitError(f"expected a price such as 3.60, not {price!r}") from None
        return parse_rate(amount * self._usd / Decimal(str(hours)))

    def note_unknown(self, names: Iterable[str]) -> Sequence[str]:
        """Store the names of accelerators that are not in the catalog; the method `identity` later
        reports these names. Return the names sorted and without duplicates.
        """
        self._unknown = sorted(set(names))
        return self._unknown

    def names(self, setting: str) -> Sequence[str]:
        """Return the values of a setting that contains a comma-separated list."""
        return list_setting(self.settings, setting)

    async def ask_zones(
        self, zones: Sequence[str], ask: Callable[[str], Awaitable[Sequence[_T]]]
    ) -> list[_T]:
        """Ask all zones at the same time, and return the answers together. `cavvy check` reports
        the zones that do not answer; if none answers, the first fault is raised. Use this for
        offers. For lists of machines, use `regions.list_regions`, so that a machine in a zone that
        does not answer does not count as ended.
        """
        found, self.silent = await ask_regions(zones, ask)
        return found

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
) -> "VmProvider":
    """Create the provider of a cloud. `cloud` creates the cloud from the settings and the clock."""
    # commands that only read the manifest in a cloud's module do not need the layer
    from cavvy.providers.vm.provider import VmProvider

    made = cloud(context.settings, context.now)
    account, zoned = made.account, HAS_PARTS in manifest.abilities
    return VmProvider(
        manifest,
        context,
        made,
        identity=account.identity,
        silent=(lambda: account.silent) if zoned else None,
        close=account.close,
    )


def join_id(zone: str, machine: str) -> str:
    """Return the id under which the layer knows a machine whose API needs the zone in every call.
    `CloudMachine.id` and the ids from `Cloud.create` then have this form."""
    return f"{zone}/{machine}"


def split_id(joined: str) -> tuple[str, str]:
    """Return the zone and the API's own id of a machine."""
    zone, _, machine = joined.partition("/")
    return zone, machine


def keep_ours(told: Sequence[Json], name: str = "name") -> Sequence[Json]:
    """Return the machines whose field `name` starts with Cavvy's prefix. Machines without this
    prefix must not be parsed, because the data of these machines can lack fields.
    """
    return [each for each in told if str(each.get(name)).startswith(NAME_PREFIX)]
