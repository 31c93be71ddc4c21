"""The Ray provider: each cluster is a region; gangs are jobs of the cluster's job API, identified
by their submission ids.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.units import UnitError, parse_rate
from cavvy.providers.base import GangSeen, GangSpec, Manifest, NoCapacity, ProviderContext, Refused
from cavvy.providers.batch.fan_out import FanOut, look_at_all, remove_from_all, whoami_all
from cavvy.providers.batch.shapes import AcceleratorRates
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.project_caches import ProjectCaches
from cavvy.providers.ray.calls import DashboardAddress, RayDashboard
from cavvy.providers.ray.cluster_client import RayCluster, RayTerms, why_not
from cavvy.providers.ray.entry import RayOptions
from cavvy.providers.ray.status import RayGangRecord

_DEFAULT = "http://127.0.0.1:8265"


class RayProvider:
    """Implements `Provider`, and the abilities listed in the manifest."""

    def __init__(self, manifest: Manifest, context: ProviderContext) -> None:
        self.manifest = manifest
        self._context = context
        self._mark = hashlib.sha256(context.installation.encode()).hexdigest()[:12]
        try:
            self._gpu_rate = AcceleratorRates(self._text("price_usd_gpu_hr") or "0")
        except (UnitError, ValueError) as error:
            raise Refused(f"[providers.ray] price_usd_gpu_hr: {error}") from error
        self._node_rate = parse_rate(str(context.settings.get("price_usd_node_hr", 0)))
        self._ledger = LaunchLedger(context.state, RayGangRecord)
        self._caches = ProjectCaches(context.state)
        self._sites: dict[str, RayCluster] = {}
        self._parts = FanOut[Sequence[Offer]]()

    async def offers(self) -> Sequence[Offer]:
        ask = {
            name: partial(site.offers, self._gpu_rate, self._node_rate)
            for name, site in self.sites().items()
        }
        return [offer for offers in (await self._parts.ask(ask)).values() for offer in offers]

    def silent(self) -> Sequence[str]:
        return self._parts.silent

    async def launch(self, gang: GangSpec) -> None:
        site = self.sites().get(gang.offer.region)
        if site is None or gang.offer.provider != self.manifest.name:
            raise NoCapacity(f"{gang.offer.key}: no configured cluster has this offer")
        async with self._ledger.lock(gang.name):
            await self._ledger.refresh(gang.name)
            await site.launch(gang)

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        await self._ledger.refresh(name)
        return await look_at_all((site.gangs(name) for site in self.sites().values()), name)

    async def remove(self, name: str) -> None:
        async with self._ledger.lock(name):
            await self._ledger.refresh(name)
            await remove_from_all(site.remove(name) for site in self.sites().values())

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        return why_not(self._context.node_endpoint)

    async def whoami(self) -> Sequence[tuple[str, str]]:
        return await whoami_all({name: site.whoami for name, site in self.sites().items()})

    async def close(self) -> None:
        await self._parts.close()
        for site in self._sites.values():
            site.api.close()

    def sites(self) -> Mapping[str, RayCluster]:
        """Return the clusters in use, by name. Raises Refused."""
        if not self._sites:
            options = RayOptions(
                namespace=self._text("namespace") or "cavvy",
                python=self._text("python") or "python",
                folder=self._text("folder").rstrip("/") or "~/.cavvy-ray",
                spread=bool(self._context.settings.get("spread", False)),
                wait=bool(self._context.settings.get("wait", False)),
            )
            terms = RayTerms(
                mark=self._mark,
                options=options,
                node_endpoint=self._context.node_endpoint,
                caches=self._caches,
                now=self._context.now,
            )
            text = self._text("addresses") or _DEFAULT
            for address in read_addresses(text, self._read_headers, self._text("ca_file")):
                if address.name in self._sites:
                    self._sites.clear()
                    raise Refused(
                        f"[providers.ray] addresses: two clusters are called {address.name}; give "
                        "them different names"
                    )
                self._sites[address.name] = RayCluster(RayDashboard(address), self._ledger, terms)
        return self._sites

    def _read_headers(self) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        if self._text("headers_file"):
            for line in self._read("headers_file").splitlines():
                name, colon, value = line.partition(":")
                if line.strip() and not colon:
                    raise Refused(
                        "[providers.ray] headers_file: a line is not of the form `Name: value`"
                    )
                if colon:
                    headers[name.strip()] = value.strip()
        if self._text("token_file"):
            headers["Authorization"] = f"Bearer {self._read('token_file').strip()}"
        return headers

    def _read(self, setting: str) -> str:
        path = Path(self._text(setting)).expanduser()
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"[providers.ray] {setting}: {path} cannot be read: {error}") from error

    def _text(self, name: str) -> str:
        return str(self._context.settings.get(name, "")).strip()


def read_addresses(
    text: str, read_headers: Callable[[], Mapping[str, str]], ca_file: str
) -> Sequence[DashboardAddress]:
    """Parse addresses of the form `NAME=URL` or `URL`, separated by spaces or commas. Raises
    Refused.
    """
    found = []
    for word in text.replace(",", " ").split():
        name, equals, url = word.partition("=")
        if not equals or "/" in name:
            name, url = "", word
        url = url.rstrip("/")
        scheme, slashes, rest = url.partition("://")
        if scheme not in ("http", "https") or not slashes or not rest:
            raise Refused(f"[providers.ray] addresses: {word!r} is not NAME=http://HOST:PORT")
        host = rest.partition("/")[0]
        if "@" in host:
            raise Refused(
                "[providers.ray] addresses: an address must not contain a user and "
                "password; put them into a header in `headers_file`"
            )
        name = name or host.partition(":")[0]
        if not all(each.isalnum() or each in "-._" for each in name):
            raise Refused(
                f"[providers.ray] addresses: {name!r} is not a valid name; use letters, "
                "digits, '-', '.' and '_'"
            )
        found.append(
            DashboardAddress(name=name, url=url, read_headers=read_headers, ca_file=ca_file or None)
        )
    return found
