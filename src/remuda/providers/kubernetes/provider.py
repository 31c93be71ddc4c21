"""Kubernetes as a provider: each context is a region, gangs are groups of bare pods."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from remuda.domain.offers import Offer
from remuda.domain.tasks import Task
from remuda.domain.units import UnitError, parse_rate
from remuda.providers.base import (
    GangSeen,
    GangSpec,
    Manifest,
    NoCapacity,
    ProviderContext,
    Refused,
)
from remuda.providers.kubernetes.calls.api import Api
from remuda.providers.kubernetes.calls.kubeconfig import Context, Login, read_contexts
from remuda.providers.kubernetes.cluster import RateOf, list_offers
from remuda.providers.kubernetes.export import make_export
from remuda.providers.kubernetes.introduction import introduce
from remuda.providers.kubernetes.lines import Lines
from remuda.providers.kubernetes.policy import make_policy
from remuda.providers.kubernetes.quota import limit
from remuda.providers.kubernetes.site import Site, Terms
from remuda.providers.kubernetes.watch import Watch
from remuda.providers.kubernetes.wishes import read_wishes

_T = TypeVar("_T")


class KubernetesProvider:
    """Implements Provider, SignalsChanges, Carries, ChecksTasks, Introduces, StatesPolicy, Exports and Closes."""

    def __init__(self, manifest: Manifest, context: ProviderContext) -> None:
        self.manifest = manifest
        self._context = context
        self._settings = context.settings
        self.mark = hashlib.sha256(context.installation.encode()).hexdigest()[:12]
        self._wishes = read_wishes(context.settings)
        try:
            self._gpu_rate = RateOf(self._text("price_usd_gpu_hr") or "0")
        except (UnitError, ValueError) as error:
            raise Refused(f"[providers.kubernetes] price_usd_gpu_hr: {error}") from error
        self._sites: dict[str, Site] = {}
        self._watches: dict[str, Watch] = {}
        self._changes: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()

    async def offers(self) -> Sequence[Offer]:
        return [offer for site in self.sites().values() for offer in await self._offers_of(site)]

    async def launch(self, gang: GangSpec) -> None:
        site = self.sites().get(gang.offer.region)
        if site is None or gang.offer.provider != self.manifest.name:
            raise NoCapacity(f"{gang.offer.key}: not an offer of a context that is used now")
        if gang.offer.zone not in (None, site.api.context.namespace):
            raise NoCapacity(f"{gang.offer.key}: the namespace used is {site.api.context.namespace}")
        await site.launch(gang)

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        sites = self.sites().values()
        answers = await asyncio.gather(*(site.gangs(name) for site in sites), return_exceptions=True)
        found = [seen for answer in answers if not isinstance(answer, BaseException) for seen in answer]
        problem = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        if problem is not None and (name is None or not found):
            raise problem
        return found

    async def remove(self, name: str) -> None:
        await self._ask_all(lambda site: site.remove(name))

    async def changed(self) -> str:
        self._watch()
        name = await self._changes.get()
        self._queued.discard(name)
        return name

    async def carry(self) -> None:
        """Keep a line to the pods of every gang."""
        self._watch()
        for watch in self._watches.values():
            watch.carry()
        try:
            await asyncio.Event().wait()
        finally:
            for watch in self._watches.values():
                watch.stop_carrying()

    def check(self, task: Task) -> Sequence[str]:
        if any(volume.options for volume in task.volumes):
            return ["volumes: pods mount NFS with the options of their node; leave `options` out"]
        return []

    async def introduce(self) -> Sequence[tuple[str, str]]:
        return [fact for site in self.sites().values() for fact in await introduce(site, self._wishes)]

    def policy(self) -> str:
        return make_policy(self._namespace(None))

    def export(self, task: Task, offer: Offer | None, nodes: int) -> str:
        return make_export(task, offer, nodes, self._wishes)

    async def close(self) -> None:
        for watch in self._watches.values():
            await watch.close()
        for site in self._sites.values():
            await site.close()

    def sites(self) -> Mapping[str, Site]:
        """The contexts in use. Raises Refused."""
        if not self._sites:
            wanted = [name.strip() for name in self._text("contexts").split(",") if name.strip()]
            for context in read_contexts(self._text("kubeconfig"), wanted):
                self._sites[context.name] = self._make_site(context)
        return self._sites

    def _make_site(self, context: Context) -> Site:
        context = replace(context, namespace=self._namespace(context))
        api = Api(context, Login(context, self._context.home, self._context.now))
        terms = Terms(
            mark=self.mark,
            wishes=self._wishes,
            agent=self._context.agent_archive,
            now=self._context.now,
            changed=self._changed,
        )
        return Site(api, Lines(api, self._context.server_address, self._context.home), terms)

    async def _offers_of(self, site: Site) -> Sequence[Offer]:
        nodes, quotas = await asyncio.gather(site.nodes(), site.quotas())
        offers = list_offers(
            nodes,
            region=site.api.context.name,
            zone=site.api.context.namespace,
            gpu_rate=self._gpu_rate,
            node_rate=parse_rate(str(self._settings.get("price_usd_node_hr", 0))),
            waits=self._wishes.waits,
        )
        return [limit(offer, nodes, quotas) for offer in offers]

    async def _ask_all(self, ask: Callable[[Site], Awaitable[_T]]) -> None:
        answers = await asyncio.gather(*(ask(site) for site in self.sites().values()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    def _watch(self) -> None:
        for name, site in self.sites().items():
            if name not in self._watches:
                self._watches[name] = Watch(site, self.mark, self._changed)

    def _changed(self, gang: str) -> None:
        if gang not in self._queued:
            self._queued.add(gang)
            self._changes.put_nowait(gang)

    def _namespace(self, context: Context | None) -> str:
        return self._text("namespace") or (context.namespace if context else "default")

    def _text(self, name: str) -> str:
        return str(self._settings.get(name, "")).strip()
