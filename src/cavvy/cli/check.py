"""`cavvy check`: shows for each provider whether it can be used, which identity the user has, and
which features the provider does not support.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.providers import (
    ASK_TIMEOUT_S,
    SILENT,
    find_instance,
    foresee_node_endpoint,
    list_instance,
    list_prices,
    load_settings,
)
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import positive_option
from cavvy.cli.view.output import (
    TableColumn,
    json_out,
    output_option,
    pairs_out,
    rows_out,
    text_out,
)
from cavvy.domain.values import Struct, field, replace

if TYPE_CHECKING:
    from cavvy.providers.base import Manifest, NodeEndpoint, Provider, ServicePage
    from cavvy.providers.registry import KnownProvider
    from cavvy.settings import Settings

_STATES = ("ready", "fails", "off", "not configured")  # the order of the list
_DOUBT_S = 10.0  # to read offers and compare them with the catalog
_MOST_DOUBTS = 3  # doubtful offers that are shown
_DETAILS = 100  # characters of findings in the list; `cavvy check NAME` shows all


class ProviderFinding(Struct, frozen=True, kw_only=True):
    """The result of checking one provider."""

    name: str
    title: str = ""
    docs: str = ""
    rights: str = ""  # the smallest set of permissions that the provider needs
    file: str = ""  # path of the settings file
    enabled: bool
    test_double: bool = False
    off: bool = False  # disabled by `enabled = false`
    problem: str = ""  # why the provider cannot be used, or "" if it can
    # pairs of name and value: the identity and other findings
    facts: Sequence[tuple[str, str]] = ()
    settings: Mapping[str, object] = field(default_factory=dict)  # the settings in use
    # what each setting does, by name
    choices: Mapping[str, str] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    service: str = ""  # a cloud's service for which the provider was checked
    page: "ServicePage | None" = None  # of this service

    @property
    def state(self) -> str:
        if self.off:
            return "off"
        return "not configured" if not self.enabled else "fails" if self.problem else "ready"

    @property
    def way_in(self) -> str:
        """A text that states how the user must change the settings to enable the provider."""
        table = f"[providers.{self.name}]"
        command = f"run `cavvy setup {self.name}`"
        return f"{command}, or remove `enabled = false` from {table}" if self.off else command


@click.command("check")
@click.argument("name", required=False)
@click.option(
    "--all", "everything", is_flag=True, help="Also list the providers that are not configured."
)
@click.option("--policy", is_flag=True, help="Print only the minimal permissions that NAME needs.")
@click.option(
    "--live",
    is_flag=True,
    help="Rent the cheapest machine of NAME for about a minute, and print its bill.",
)
@positive_option(
    "--max-usd", default=1.0, show_default=True, help="The maximum cost of the check with --live."
)
@output_option
def command(
    name: str | None, everything: bool, policy: bool, live: bool, max_usd: float, output: str
) -> None:
    """Show whether each provider can be used and which features it does not support.

    Without NAME, the configured providers are listed; with NAME, this provider is shown in detail.
    gke, aks, eks and coreweave stand for the clusters of these services at the provider kubernetes.
    The exit code is 1 if a configured provider (or NAME) cannot be used.

    --live starts a small job on the cheapest on-demand machine, waits until its agent answers, ends
    the job, and checks that nothing is left. The machine is also removed after Ctrl-C or a failure.
    The server on this computer removes the machine, so leave the computer on. While the computer is
    off, a machine that cannot end itself is billed, even beyond --max-usd. The requests to a cloud
    are recorded, without secrets, in a file that tests can replay. Check the recorded requests
    before you share the file.
    """
    service, name = _split_service(name)
    if policy:
        click.echo(_policy(name).rstrip("\n"))
        return
    if live and service:
        raise CommandFailure(
            f"--live rents a machine of a provider, and {service} stands for clusters of {name}",
            f"run `cavvy check {name} --live`",
            exit_code=2,
        )
    if live:
        _check_live(name, max_usd, output)
        return
    findings = [each for each in _examine(name) if name or each.enabled or not each.test_double]
    if service:
        findings = [_as_service(each, service) for each in findings]
    if output == "json":
        json_out([_plain(finding) for finding in findings] if name is None else _plain(findings[0]))
    elif name is None or output == "csv":
        _list(findings, output, everything or output == "csv")
    else:
        _show(findings[0])
    wanted = findings if name is not None else [finding for finding in findings if finding.enabled]
    if any(finding.state != "ready" for finding in wanted):
        raise SystemExit(1)


def _split_service(name: str | None) -> tuple[str, str | None]:
    """Return a cloud's Kubernetes service that stands for a provider, or "", and the provider."""
    from cavvy.domain.offers import CLUSTER_SERVICES

    service = (name or "").lower()
    return (service, CLUSTER_SERVICES[service]) if service in CLUSTER_SERVICES else ("", name)


def _as_service(found: ProviderFinding, service: str) -> ProviderFinding:
    """Return the finding with the page of the service, and a problem if no node is run by it."""
    from cavvy.cli.task.unknown import explain_cluster
    from cavvy.providers import registry

    manifest = registry.manifest_of(registry.list_known()[found.name])
    found = replace(found, service=service, page=manifest.services[service])
    if found.state != "ready" or f"service {service}" in {label for label, _ in found.facts}:
        return found
    problem = f"no node in the contexts in use belongs to {service}: {explain_cluster(service)}"
    return replace(found, problem=problem)


def _policy(name: str | None) -> str:
    """Return the text that `--policy` prints."""
    from cavvy.providers import registry
    from cavvy.providers.abilities import STATES_POLICY, ability
    from cavvy.providers.base import ProviderContext, ProviderError

    if name is None:
        raise CommandFailure(
            "--policy needs a provider", "run `cavvy check NAME --policy`", exit_code=2
        )
    known, installed = load_known(name)
    context = ProviderContext(installation="check", home=known.home / "providers")
    try:
        provider = registry.make(installed[name], known.providers.get(name, {}), context)
    except ProviderError as error:
        raise CommandFailure(f"{name} is misconfigured: {error}") from error
    states = ability(provider, STATES_POLICY)
    if states is None:
        raise CommandFailure(
            f"{name} has no permission policy to print",
            f"`cavvy check {name}` shows your identity at the provider",
        )
    return states.policy()


def _check_live(name: str | None, max_usd: float, output: str) -> None:
    """Rent a machine of provider NAME, and print the result. The exit code is 1 if the check
    failed.
    """
    from cavvy.cli.reach.live_check import check_live
    from cavvy.domain.units import Money, UnitError, format_usd, parse_usd

    if name is None:
        raise CommandFailure("--live needs a provider", "run `cavvy check NAME --live`", 2)
    try:
        limit = parse_usd(max_usd)
    except UnitError as error:
        raise CommandFailure(f"--max-usd: {error}", "an example: `--max-usd 1`", 2) from error
    (finding,) = _examine(name)
    if finding.state != "ready":
        raise CommandFailure(
            f"{name} is not ready: {finding.problem or finding.state}", f"run `cavvy check {name}`"
        )
    found = check_live(name, limit)
    if output == "json":
        import msgspec

        json_out(msgspec.to_builtins(found, enc_hook=str))
    else:
        pairs: list[tuple[str, object]] = [
            ("result", found.problem or "the agent answered"),
            ("bill", format_usd(Money(found.bill_micros), 4)),
            ("left", ", ".join(found.left) or "nothing"),
        ]
        pairs_out([*pairs, *([("recording", found.recording)] if found.recording else [])])
    if found.problem:
        raise SystemExit(1)


def load_known(name: str | None) -> tuple["Settings", Mapping[str, "KnownProvider"]]:
    """Return the settings and all installed providers. Raises CommandFailure if NAME or a
    [providers] table in the settings names an unknown provider.
    """
    from difflib import get_close_matches

    from cavvy.cli.task.unknown import explain_cluster
    from cavvy.providers import registry

    known = load_settings()
    installed = registry.list_known()
    for each in [*([] if name is None else [name]), *known.providers]:
        if each not in installed:
            what = (
                f"there is no provider {each!r}"
                if each == name
                else f"[providers.{each}]: there is no such provider"
            )
            close = get_close_matches(each, installed, n=1)
            if explained := explain_cluster(each):
                hint = explained
            elif each == name and os.path.splitext(each)[1]:
                hint = f"to check a task file: cavvy validate {each}"
            elif close:
                hint = f"did you mean {close[0]!r}?"
            else:
                hint = f"known: {', '.join(sorted(installed))}"
            raise CommandFailure(
                what if each == name else f"{known.file}: {what}", hint, exit_code=2
            )
    return known, installed


def _examine(name: str | None) -> list[ProviderFinding]:
    import asyncio

    known, installed = load_known(name)
    node_endpoint = foresee_node_endpoint(known)
    names = sorted(installed) if name is None else [name]
    return asyncio.run(_examine_all([installed[each] for each in names], known, node_endpoint))


async def _examine_all(
    providers: Sequence["KnownProvider"], known: "Settings", node_endpoint: "NodeEndpoint | None"
) -> list[ProviderFinding]:
    import asyncio

    return list(
        await asyncio.gather(*(examine_one(each, known, node_endpoint) for each in providers))
    )


async def examine_one(
    known: "KnownProvider", settings: "Settings", node_endpoint: "NodeEndpoint | None"
) -> ProviderFinding:
    import asyncio

    from cavvy.agent.bundle import make_archive
    from cavvy.providers import registry
    from cavvy.providers.base import ProviderContext, ProviderError
    from cavvy.providers.objections import refuses_all

    table = settings.providers.get(known.name, {})
    tables = {known.name: table} if known.name in settings.providers else {}
    enabled = known.name in [each.name for each in registry.enabled(tables)]
    found = ProviderFinding(
        name=known.name,
        file=str(settings.file),
        enabled=enabled,
        off=not enabled and table.get("enabled") is False,
    )
    try:
        manifest = registry.manifest_of(known)
        found = _described(found, manifest)
        values = registry.check_settings(manifest, table)
        if not enabled:
            return found
        found = replace(found, settings=values)
        context = ProviderContext(
            installation="check",
            home=settings.home / "providers",
            server_folder=settings.home,
            agent_archive=make_archive,  # hosts try with it how they can protect themselves
            node_endpoint=node_endpoint,
            find_instance=find_instance,
            list_instance=list_instance,
            list_prices=list_prices,
        )
        # This code only queries the provider and launches nothing.
        provider = registry.make(known, table, context)
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return replace(found, facts=await _whoami(provider), problem=refuses_all(provider))
    except ProviderError as error:
        return replace(found, problem=str(error))
    except TimeoutError:
        return replace(found, problem=SILENT)


def _described(found: ProviderFinding, manifest: "Manifest") -> ProviderFinding:
    """Return a copy of the finding, extended with the provider's manifest."""
    return replace(
        found,
        title=manifest.title,
        test_double=manifest.test_double,
        docs=manifest.docs,
        rights=manifest.rights,
        choices={setting.name: setting.consequence for setting in manifest.settings},
        unsupported={str(feature): reason for feature, reason in manifest.unsupported.items()},
    )


async def _whoami(provider: "Provider") -> Sequence[tuple[str, str]]:
    """Return the user's identity at the provider. If the provider does not report an identity,
    return the number of the provider's offers instead. A number shows that the provider answers.
    """
    from cavvy.providers.abilities import CLOSEABLE, WHO_AM_I, ability

    try:
        if known := ability(provider, WHO_AM_I):
            facts = await known.whoami()
            return [*facts, *await _find_doubts(provider)]
        return [("offers", str(len(await provider.offers()))), *await _find_doubts(provider)]
    finally:
        if closeable := ability(provider, CLOSEABLE):
            await closeable.close()


async def _find_doubts(provider: "Provider") -> Sequence[tuple[str, str]]:
    """Return facts about offers whose price, memory or number of accelerators is far from all other
    offers in the catalog."""
    import asyncio

    from cavvy.cli.task.market import find_doubts
    from cavvy.providers.base import ProviderError

    if provider.manifest.test_double:
        return []
    try:
        async with asyncio.timeout(_DOUBT_S):
            offers = [each for each in await provider.offers() if each.accelerator]
            doubts = [*(await asyncio.to_thread(find_doubts, offers)).values()]
    except (ProviderError, TimeoutError):  # what fails here is no fault of the setup
        return []
    more = f" (and {len(doubts) - _MOST_DOUBTS} more offers)" if len(doubts) > _MOST_DOUBTS else ""
    count = [("offers in doubt", f"{len(doubts)} of {len(offers)}{more}")] if doubts else []
    return [*count, *(("in doubt", each) for each in doubts[:_MOST_DOUBTS])]


def _list(findings: Sequence[ProviderFinding], output: str, everything: bool) -> None:
    """List the providers that are ready, then those that fail, then, with `everything`, the
    others. The others are otherwise named below the table.
    """
    columns = [
        TableColumn("provider"),
        TableColumn("state"),
        TableColumn("unsupported", hidden=True),
        TableColumn("docs", hidden=True),
        TableColumn("details", wrap=True),
    ]
    ordered = sorted(findings, key=lambda each: _STATES.index(each.state))
    rows = [
        (each.name, each.state, ", ".join(each.unsupported), each.docs, _details(each))
        for each in ordered
        if everything or each.enabled or each.off or each.problem
    ]
    rows_out(columns, rows, output, empty="no provider is configured")
    if output == "table":
        folded = [each.name for each in ordered][len(rows) :]
        if folded:
            text_out(f"\nNot configured ({len(folded)}): {', '.join(folded)}")
        click.echo(f"\nThe settings are in {findings[0].file}.")
        text_out(
            "`cavvy check NAME` shows a provider's settings, how to set it up, and why it does not "
            "support a feature."
        )


def _details(finding: ProviderFinding) -> str:
    if finding.problem:
        return finding.problem
    if not finding.enabled:
        return f"{finding.title}: {finding.way_in}"
    facts = [f"{what} {value}" for what, value in finding.facts if what != "note"]
    shown = [
        fact for n, fact in enumerate(facts) if n == 0 or len(", ".join(facts[: n + 1])) <= _DETAILS
    ]
    more = [f"and {len(facts) - len(shown)} more"] if len(shown) < len(facts) else []
    return ", ".join([*shown, *more])


def _list_machine_prices(page: "ServicePage") -> Sequence[tuple[str, str]]:
    """Return the lowest prices of an accelerator at the service's cloud, by its name, and what has
    no price."""
    from cavvy.domain.offers import Purchase
    from cavvy.domain.units import Money, format_usd

    found: dict[str, dict[Purchase, tuple[float, str]]] = {}
    offers = list_prices(page.cloud)
    for each in offers:
        if each.accelerator and each.accelerator_count and not each.reserved:
            price = each.rate.micros_per_hour / each.accelerator_count / each.accelerator_part
            before = found.setdefault(each.accelerator, {})
            before[each.purchase] = min(
                before.get(each.purchase, (price, "")), (price, each.instance_type)
            )
    rows = []
    for name, prices in sorted(found.items()):
        parts = [
            f"{format_usd(Money(round(price)))} {purchase}" + (f" ({instance})" if instance else "")
            for purchase, (price, instance) in sorted(prices.items())
        ]
        rows.append((name, "; ".join(parts)))
    unpriced = [name for name, prices in sorted(found.items()) if Purchase.SPOT not in prices]
    if unpriced and found.keys() - set(unpriced):
        rows.append(("no spot price", ", ".join(unpriced)))
    elif unpriced:
        rows.append(("no spot price", f"the catalog has none of {page.cloud}"))
    if not any(not each.accelerator for each in offers):
        rows.append(("no price", "of machines without accelerators: set `price_usd_node_hr`"))
    return rows


def _show_service(finding: ProviderFinding, page: "ServicePage") -> None:
    """Show the page of a cloud's Kubernetes service."""
    from cavvy.cli.task.unknown import explain_cluster

    pairs: list[tuple[str, object]] = [
        ("service", f"{finding.service}: {page.title}, by the provider {finding.name}"),
        ("state", finding.state),
    ]
    if finding.problem:
        pairs.append(("problem", finding.problem))
    if not finding.enabled:
        pairs.append(("to use it", explain_cluster(finding.service)))
        pairs.append(("settings", f"{finding.file}; all: `cavvy check {finding.name}`"))
    pairs_out([*pairs, *finding.facts, ("docs", _name_page(finding.docs))])
    click.echo("\nWhat is its own")
    pairs_out([(f"  {what}", text) for what, text in page.facts])
    click.echo(f"\nThe lowest prices of an accelerator in the catalog, per hour ({page.cloud})")
    pairs_out([(f"  {name}", price) for name, price in _list_machine_prices(page)])
    click.echo("\nWhat is missing, or needs a step")
    missing = [*page.missing, *finding.unsupported.items()]
    pairs_out([(f"  {what}", text) for what, text in missing])


def _name_page(docs: str) -> str:
    """Name a page of the documentation for readers of the site, who see no files."""
    if not docs.startswith("docs/") or not docs.endswith(".md"):
        return docs
    return f"{docs.removeprefix('docs/').removesuffix('.md')}, a page of the documentation"


def _show(finding: ProviderFinding) -> None:
    if finding.page is not None:
        _show_service(finding, finding.page)
        return
    pairs: list[tuple[str, object]] = [
        ("provider", f"{finding.name}: {finding.title}"),
        ("state", finding.state),
    ]
    if finding.problem:
        pairs.append(("problem", finding.problem))
    if not finding.enabled:
        pairs.append(("to use it", f"{finding.way_in}, which writes {finding.file}"))
    pairs += finding.facts
    if finding.rights:
        pairs.append(("rights needed", finding.rights))
    pairs.append(("docs", _name_page(finding.docs)))
    pairs_out(pairs)
    if finding.settings:
        click.echo("\nSettings in use")
        pairs_out([(f"  {key}", value) for key, value in finding.settings.items()])
    if not finding.enabled and finding.choices:
        click.echo("\nIts settings")
        pairs_out([(f"  {key}", what) for key, what in finding.choices.items()])
    if finding.unsupported:
        click.echo("\nNot supported, and why")
        pairs_out([(f"  {feature}", reason) for feature, reason in finding.unsupported.items()])


def _plain(finding: ProviderFinding) -> dict[str, object]:
    page = finding.page
    own = (
        {}
        if page is None
        else {
            "service": finding.service,
            "service_title": page.title,
            "own": dict(page.facts),
            "prices": dict(_list_machine_prices(page)),
            "missing": dict(page.missing),
        }
    )
    return {
        **own,
        "provider": finding.name,
        "title": finding.title,
        "docs": finding.docs,
        "rights": finding.rights or None,
        "state": finding.state,
        "problem": finding.problem or None,
        "facts": [{"what": what, "value": value} for what, value in finding.facts],
        "settings": dict(finding.settings),
        "unsupported": dict(finding.unsupported),
    }
