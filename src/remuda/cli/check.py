"""`remuda check`: whether each provider can be used, as whom, and what it lacks."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from remuda.cli.output import Column, json_out, output_option, pairs_out, rows_out
from remuda.cli.session import Failure

if TYPE_CHECKING:
    from remuda.providers.base import Manifest, Provider
    from remuda.providers.registry import Known
    from remuda.settings import Settings

ASK_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found out about one provider."""

    name: str
    title: str = ""
    docs: str = ""
    enabled: bool
    problem: str = ""  # why it cannot be used, "" where it can
    facts: Sequence[tuple[str, str]] = ()  # as whom it acts and what it sees
    settings: Mapping[str, object] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        return "not configured" if not self.enabled else "fails" if self.problem else "ready"


@click.command("check")
@click.argument("name", required=False)
@click.option("--policy", is_flag=True, help="Print the least rights that NAME needs, and nothing else.")
@output_option
def command(name: str | None, policy: bool, output: str) -> None:
    """Say per provider whether it is configured and what it lacks.

    Without NAME all installed providers are listed; with it, one is shown with everything that it says about itself.
    The exit code is 1 where a configured provider (or the one named) cannot be used.
    """
    if policy:
        click.echo(_policy(name).rstrip("\n"))
        return
    findings = _examine(name)
    if output == "json":
        json_out([_plain(finding) for finding in findings] if name is None else _plain(findings[0]))
    elif name is None or output == "csv":
        _list(findings, output)
    else:
        _show(findings[0])
    wanted = findings if name is not None else [finding for finding in findings if finding.enabled]
    if any(finding.state != "ready" for finding in wanted):
        raise SystemExit(1)


def _policy(name: str | None) -> str:
    """What `--policy` prints."""
    from remuda.providers import registry
    from remuda.providers.base import ProviderError, StatesPolicy

    if name is None:
        raise Failure("whose policy?", "name a provider: remuda check NAME --policy", exit_code=2)
    known, everyone = _load(name)
    maker = registry.Maker(installation="check", home=known.home / "providers")
    try:
        provider = maker.make(everyone[name], known.providers.get(name, {}))
    except ProviderError as error:
        raise Failure(f"{name} cannot be made as it is configured: {error}") from error
    if not isinstance(provider, StatesPolicy):
        raise Failure(f"{name} needs no rights that could be written down", "`remuda check` says what it acts as")
    return provider.policy()


def _load(name: str | None) -> tuple["Settings", Mapping[str, "Known"]]:
    """The settings and all installed providers; NAME must be one of them."""
    from remuda import settings
    from remuda.providers import registry

    try:
        known = settings.load()
    except settings.SettingsError as error:
        raise Failure(error.message, error.hint, exit_code=2) from error
    everyone = registry.list_known()
    if name is not None and name not in everyone:
        raise Failure(f"there is no provider {name!r}", f"known: {', '.join(sorted(everyone))}", exit_code=2)
    return known, everyone


def _examine(name: str | None) -> list[Finding]:
    known, everyone = _load(name)
    nobody = [table for table in known.providers if table not in everyone]
    if name is None and nobody:
        raise Failure(
            f"{known.file}: [providers.{nobody[0]}] names no provider",
            f"known: {', '.join(sorted(everyone))}",
            exit_code=2,
        )
    names = sorted(everyone) if name is None else [name]
    return asyncio.run(_examine_all([everyone[each] for each in names], known))


async def _examine_all(providers: Sequence["Known"], known: "Settings") -> list[Finding]:
    return list(await asyncio.gather(*(_examine_one(each, known) for each in providers)))


async def _examine_one(known: "Known", settings: "Settings") -> Finding:
    from remuda.providers import registry
    from remuda.providers.base import ProviderError

    table = settings.providers.get(known.name, {})
    tables = {known.name: table} if known.name in settings.providers else {}
    enabled = known.name in [each.name for each in registry.enabled(tables)]
    try:
        manifest = registry.manifest_of(known)
    except ProviderError as error:
        return Finding(name=known.name, enabled=enabled, problem=str(error))
    try:
        values = registry.check_settings(manifest, table)
    except ProviderError as error:
        return _finding(manifest, enabled, problem=str(error))
    if not enabled:
        return _finding(manifest, enabled)
    maker = registry.Maker(installation="check", home=settings.home / "providers")  # asks, and starts nothing
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            facts = await _introduce(maker.make(known, table))
    except ProviderError as error:
        return _finding(manifest, enabled, problem=str(error), settings=values)
    except TimeoutError:
        return _finding(manifest, enabled, problem=f"no answer within {ASK_TIMEOUT_S} s", settings=values)
    return _finding(manifest, enabled, facts=facts, settings=values)


async def _introduce(provider: "Provider") -> Sequence[tuple[str, str]]:
    """As whom the provider acts; one that cannot say is asked for its offers, which tells whether it works."""
    from remuda.providers.base import Closes, Introduces

    try:
        if isinstance(provider, Introduces):
            return await provider.introduce()
        return [("offers", str(len(await provider.offers())))]
    finally:
        if isinstance(provider, Closes):
            await provider.close()


def _finding(
    manifest: "Manifest",
    enabled: bool,
    *,
    problem: str = "",
    facts: Sequence[tuple[str, str]] = (),
    settings: Mapping[str, object] | None = None,
) -> Finding:
    return Finding(
        name=manifest.name,
        title=manifest.title,
        docs=manifest.docs,
        enabled=enabled,
        problem=problem,
        facts=facts,
        settings=settings or {},
        lacks={str(feature): reason for feature, reason in manifest.lacks.items()},
    )


def _list(findings: Sequence[Finding], output: str) -> None:
    columns = [
        Column("provider"),
        Column("state"),
        Column("says", wide=True),
        Column("lacks", wide=True),
        Column("docs", hidden=True),
    ]
    rows = [(each.name, each.state, _says(each), ", ".join(each.lacks), each.docs) for each in findings]
    rows_out(columns, rows, output)
    if output == "table":
        click.echo("\n`remuda check NAME` says why each is lacking, and which settings there are.")


def _says(finding: Finding) -> str:
    if finding.problem:
        return finding.problem
    if not finding.enabled:
        return f"add [providers.{finding.name}] to the settings file to use {finding.title or 'it'}"
    return ", ".join(f"{what} {value}" for what, value in finding.facts if what != "note")


def _show(finding: Finding) -> None:
    pairs: list[tuple[str, object]] = [("provider", f"{finding.name}: {finding.title}"), ("state", finding.state)]
    if finding.problem:
        pairs.append(("problem", finding.problem))
    if not finding.enabled:
        pairs.append(("to use it", f"add [providers.{finding.name}] to the settings file"))
    pairs += [*finding.facts, ("docs", finding.docs)]
    pairs_out(pairs)
    if finding.settings:
        click.echo("\nSettings in force")
        pairs_out([(f"  {key}", value) for key, value in finding.settings.items()])
    if finding.lacks:
        click.echo("\nNot here, and why")
        pairs_out([(f"  {feature}", reason) for feature, reason in finding.lacks.items()])


def _plain(finding: Finding) -> dict[str, object]:
    return {
        "provider": finding.name,
        "title": finding.title,
        "docs": finding.docs,
        "state": finding.state,
        "problem": finding.problem or None,
        "facts": [{"what": what, "value": value} for what, value in finding.facts],
        "settings": dict(finding.settings),
        "lacks": dict(finding.lacks),
    }
