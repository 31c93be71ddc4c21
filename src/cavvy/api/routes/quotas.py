"""The route for the account's quotas at the enabled providers."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

from fastapi import Query

from cavvy.api.app_state import AppState
from cavvy.api.errors import ApiProblem
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import on_installation
from cavvy.api.wire import view
from cavvy.client import wire
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.accounts import Permission
from cavvy.domain.quotas import Quota
from cavvy.providers.base import ProviderError

router = RouteGroup("fleet", prefix="/v1")


@router.get("/quotas", rule=on_installation(Permission.VIEW))
async def quotas(
    app_state: AppState, provider: Annotated[str | None, Query(max_length=63)] = None
) -> wire.QuotaReport:
    """List the account's quotas at the providers."""
    pool = app_state.control_plane.pool
    names = sorted(pool.providers) if provider is None else [provider]
    if provider is not None and provider not in pool.providers:
        enabled = ", ".join(sorted(pool.providers))
        raise ApiProblem(
            "provider-not-enabled",
            f"the provider {provider!r} is not enabled; enabled: {enabled}",
            f"`cavvy check {provider}` shows how to set it up",
        )
    answers = await asyncio.gather(*(_ask(pool, name) for name in names))
    told = dict(zip(names, answers, strict=True))
    rows = [view(wire.QuotaRow, quota) for quotas, _ in answers for quota in quotas]
    untold = [
        wire.UntoldQuotas(provider=name, reason=reason)
        for name, (_, reasons) in told.items()
        for reason in reasons
    ]
    return wire.QuotaReport(quotas=rows, untold=untold)


async def _ask(pool: ProviderPool, name: str) -> tuple[Sequence[Quota], Sequence[str]]:
    """Return the provider's quotas, and the reasons why some quotas are not known."""
    try:
        found = await pool.quotas(name)
    except ProviderError as error:
        return (), [str(error)]
    if found is None:
        reason = pool.providers[name].manifest.no_quotas
        return (), [reason or "Cavvy does not read quotas of this provider"]
    return found, pool.untold_quotas(name)
