"""Settings that several providers share. The module imports no module that opens connections."""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import ParamSpec

from cavvy.catalog.tables import CURRENCY_SOURCE, find_rate
from cavvy.domain.tasks import Scalar
from cavvy.providers.base import ProviderSetting, SettingKind

_P = ParamSpec("_P")
_DEAREST_USD = 10.0  # no currency is worth more; the dearest, the Kuwaiti dinar, is worth about 3.3
_EXCHANGE = "usd_per_"  # the start of the name of the setting with the exchange rate

_CONSENT = "If the price is above 0, a job needs consent to costs, as for any paid offer."


def text(name: str, consequence: str, default: str | None = None) -> ProviderSetting:
    """Return a string setting. If `default` is None, the setting is unset by default."""
    return ProviderSetting(
        name=name, kind=SettingKind.TEXT, default=default, consequence=consequence
    )


def flag(name: str, consequence: str, *, default: bool = False) -> ProviderSetting:
    """Return a setting that is true or false."""
    return ProviderSetting(
        name=name, kind=SettingKind.FLAG, default=default, consequence=consequence
    )


def number(
    name: str,
    consequence: str,
    *,
    unit: str,
    default: float | None = None,
    minimum: float = 0,
    maximum: float | None = None,
    whole: bool = False,
) -> ProviderSetting:
    """Return a numeric setting. If `default` is None, the setting is unset by default."""
    return ProviderSetting(
        name=name,
        kind=SettingKind.INTEGER if whole else SettingKind.NUMBER,
        unit=unit,
        default=default,
        minimum=minimum,
        maximum=maximum,
        consequence=consequence,
    )


def _of_project(make: Callable[_P, ProviderSetting]) -> Callable[_P, ProviderSetting]:
    """Return `make` for settings that a project may set (`ProviderSetting.for_projects`)."""
    return lambda *args, **kwargs: make(*args, **kwargs).for_projects()


project_text = _of_project(text)
project_flag = _of_project(flag)
project_number = _of_project(number)


def disk_setting(
    consequence: str, default: int, *, minimum: int, unit: str = "GiB"
) -> ProviderSetting:
    """Return the setting `disk_gib` for the size of a machine's disk, in whole units."""
    return project_number(
        "disk_gib", consequence, unit=unit, default=default, minimum=minimum, whole=True
    )


def host_settings(hosts: str) -> Sequence[ProviderSetting]:
    """Return the settings for what a host must have beside each GPU that is rented on it. The
    provider calls its hosts `hosts`, such as "computers"."""
    return (
        project_number(
            "gpu_vcpus",
            f"Only {hosts} with at least this number of vCPUs for each GPU are used.",
            unit="vCPUs",
            default=4,
            minimum=1,
            whole=True,
        ),
        project_number(
            "gpu_memory_gib",
            f"Only {hosts} with at least this memory for each GPU are used.",
            unit="GB",
            default=16,
            minimum=1,
            whole=True,
        ),
    )


def regions_setting(regions: str) -> ProviderSetting:
    """Return the setting `regions`, which the provider calls `regions`, such as "locations"."""
    return project_text(
        "regions", f"The {regions} to use, separated by commas. The default is all {regions}."
    ).for_setup()


def exchange_rate(currency: str) -> ProviderSetting:
    """Return the setting for the exchange rate of a provider whose prices are in `currency`."""
    known = find_rate(currency)
    return number(
        f"{_EXCHANGE}{currency.lower()}",
        f"The price of one {currency} in USD, with which prices are converted. The default is the "
        f"rate of the {CURRENCY_SOURCE} on {known.as_of}; set the rate at which you are billed.",
        unit="USD",
        default=float(known.usd),
        minimum=1e-6,
        maximum=_DEAREST_USD,
    )


def read_exchange_rate(settings: Mapping[str, Scalar]) -> tuple[str, Decimal]:
    """Return the currency of the provider's prices and the price of one unit in USD. Without the
    setting of `exchange_rate`, prices are in USD."""
    for name, value in settings.items():
        if name.startswith(_EXCHANGE) and value is not None:
            return name.removeprefix(_EXCHANGE).upper(), Decimal(str(value))
    return "USD", Decimal(1)


def login_node() -> tuple[ProviderSetting, ...]:
    """Return the settings for reaching a batch system's login node, and for the folder that its
    nodes share (read by `batch.login_session.read_where`).
    """
    return (
        text(
            "host",
            "The login node, as a host name that `ssh` can connect to without a password. If "
            "this is unset, this machine is the login node.",
        ).for_setup(),
        text("ssh_options", "Options of `ssh`, such as `-J gate -i ~/.ssh/cluster`."),
        text(
            "folder",
            "A folder that the login node and all nodes see under the same path; only its owner "
            "may have access to it.",
            "~/.cavvy-cluster",
        ),
    )


def gpu_rates() -> ProviderSetting:
    """Return the setting for the prices of a cluster's accelerators, by kind (parsed by
    `batch.shapes.AcceleratorRates`).
    """
    meaning = (
        "The price of one accelerator in USD per hour: one price for all accelerators, such as "
        "`2.5`, or prices by name followed by the price of all other accelerators, such as "
        "`H100=2.5 A100=1.2 1`."
    )
    return text("price_usd_gpu_hr", f"{meaning} {_CONSENT}", "0")


def gpu_price() -> ProviderSetting:
    """Return the setting for the price of each accelerator of a cluster."""
    return _price(
        "price_usd_gpu_hr", f"Jobs pay this price for each accelerator that they use. {_CONSENT}"
    )


def node_price() -> ProviderSetting:
    """Return the setting for the price of a cluster's node without accelerators."""
    held = "a whole node; for a part of a node's CPUs, they pay the same part of the price"
    return _price(
        "price_usd_node_hr", f"Jobs without accelerators pay this price for {held}. {_CONSENT}"
    )


def price_setting(more: str = "") -> ProviderSetting:
    """Return the setting for the price of a user's own machine. `more` describes additional price
    settings of the provider.
    """
    consequence = (
        "Jobs pay this price for each accelerator that they use, or once per node if they use "
        "none. "
    )
    return _price("price_usd_hr", f"{consequence}{more}{_CONSENT}")


def isolation_setting() -> ProviderSetting:
    """Return the setting that states how jobs of several projects share a machine (read by
    `hosts.isolation`).
    """
    return text(
        "isolation",
        "How jobs of different projects share a machine. By default, only jobs of one project run "
        "on a machine at the same time. `namespaces`: jobs get their own processes, `/tmp`, "
        "`/dev/shm` and home folder, and run beside jobs of other projects. `namespaces` needs "
        "Linux and a user other than root on a machine; otherwise, only jobs of one project "
        "run at the same time. `none`: projects trust each other, and their jobs run side by side "
        "as one user. A server without accounts has one user, so its projects share machines "
        "unless `namespaces` is set.",
    )


def lost_setting(consequence: str) -> ProviderSetting:
    """Return the setting for the time after which a silent machine counts as dead."""
    return number("lost_after_s", consequence, default=600, minimum=1, unit="seconds")


def _price(name: str, consequence: str) -> ProviderSetting:
    return number(name, consequence, default=0, unit="USD per hour")
