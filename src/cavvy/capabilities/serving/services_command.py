"""`cavvy services` and `cavvy services key`: list services, show one service, and manage the keys
that clients use to call it.
"""

from typing import TYPE_CHECKING

import click

from cavvy.capabilities.serving.reach import service_argument
from cavvy.cli.reach.arguments import read_seconds
from cavvy.cli.reach.session import any_project_option, call_server, named, project_option, session
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import NumberRange, count_option, positive_option, read_usd
from cavvy.cli.view.output import TableColumn, json_option, output_option, pairs_out, rows_out
from cavvy.client.token_prices import rate_tokens, show_apis, show_priced_tokens, show_rate
from cavvy.domain.units import format_count, format_number

if TYPE_CHECKING:
    from cavvy.capabilities.serving import wire as service_wire
    from cavvy.client.service_wire import EdgePathView, ReplicaView


@click.group("services", cls=CommandGroup, invoke_without_command=True)
@any_project_option
@output_option
@click.pass_context
def command(context: click.Context, project: str | None, output: str) -> None:
    """List services with their replicas, traffic and cost. `cavvy serve FILE` starts a service."""
    if context.invoked_subcommand is not None:
        return
    from cavvy.capabilities.serving import wire as service_wire

    with session() as client:
        rows = [_row(each) for each in service_wire.list_services(client, project)]
    rates = any(row["micros_per_million_tokens"] is not None for row in rows)
    levels = any(row["availability"] is not None for row in rows)
    columns = [
        TableColumn("name"),
        TableColumn("project", hidden=len({row["project"] for row in rows}) < 2),
        TableColumn("state"),
        TableColumn("ready"),
        TableColumn("wanted"),
        TableColumn("waiting"),
        TableColumn("per_s", "REQ/S", drop=3),
        TableColumn("p95_s", "P95", _show_s, drop=2),
        TableColumn("answered", "ANSWERED", _show_share, hidden=not levels, drop=2),
        TableColumn("availability", "OF", _show_share, hidden=not levels, drop=2),
        TableColumn("spent_micros", "COST"),
        TableColumn("micros_per_million_tokens", "PER 1M", show_rate, hidden=not rates, drop=2),
        TableColumn("url", drop=1),
        TableColumn("unreachable", hidden=not any(row["unreachable"] for row in rows), wrap=True),
        TableColumn("revision", hidden=True),
        TableColumn("user", hidden=True),
    ]
    rows_out(columns, rows, output, empty="no services yet; start one with `cavvy serve FILE`")


@command.command("show")
@service_argument
@project_option
@json_option
def show(name: str, project: str, output: str) -> None:
    """Show one service: its URL, replicas and traffic, and the reason for the number of
    replicas.
    """
    from cavvy.capabilities.serving import wire as service_wire

    with session() as client:
        found = service_wire.find_service(client, project, name)
    show_service(found, output)


def show_service(found: "service_wire.ServedView", output: str) -> None:
    """Print the page of a service."""
    if output == "json":
        from msgspec import to_builtins

        from cavvy.cli.view.output import json_out

        json_out(to_builtins(found))
        return
    pairs_out(list_pairs(found))


def _row(found: "service_wire.ServedView") -> dict[str, object]:
    traffic, slo = found.traffic, found.slo
    return {
        "name": found.name,
        "project": found.project,
        "state": found.state,
        "ready": found.ready,
        "wanted": found.target,
        "waiting": traffic.waiting if traffic else None,
        "per_s": round(traffic.per_s, 1) if traffic else None,
        "p95_s": traffic.p95_s if traffic else None,
        "answered": slo.day.availability if slo else None,
        "availability": slo.availability if slo else None,
        "spent_micros": found.spent_micros,
        "micros_per_million_tokens": rate_tokens(found.spent_micros, found.tokens),
        "url": found.url,
        "unreachable": found.unreachable,
        "revision": found.revision,
        "user": found.user,
    }


def list_pairs(found: "service_wire.ServedView") -> list[tuple[str, str]]:
    """Return what `cavvy services show` shows, each with its name."""
    from cavvy.domain.units import Money, format_usd

    scale = f"{found.ready} ready, {found.target} wanted ({found.why or 'no decision yet'})"
    pairs = [
        ("service", f"{found.name} of project {found.project}, revision {found.revision}"),
        ("state", found.state),
        ("last failure", found.problem),
        ("url", found.url),
        *([("models", _show_models(found))] if found.models else []),
        *([("unreachable", found.unreachable)] if found.unreachable else []),
        ("replicas", f"{scale}; at least {found.least}, at most {found.most}"),
    ]
    pairs += [] if found.aim is None else [("on time", _show_aim(found.aim, found.most))]
    pairs += [("", _show_unplaced(found, each)) for each in found.unplaced]
    pairs += [("", _show_replica(each)) for each in found.replicas]
    pairs += [] if found.traffic is None else _list_traffic(found.traffic)
    pairs += [("fallback", _show_fallback(each)) for each in found.fallbacks]
    for each in found.edge:
        pairs += _list_edge(found, each)
    if found.slo is not None:
        periods = (("slo, last hour", found.slo.hour), ("slo, last day", found.slo.day))
        asked = (found.slo.availability, found.slo.p95_s)
        pairs += [(name, _show_level(found.slo, each)) for name, each in periods if any(asked)]
        pairs += [(each.name, _show_objective(each, found.most)) for each in found.slo.objectives]
        pairs += [] if found.slo.speed is None else [("speed", _show_speed(found.slo.speed))]
    if found.trial is not None:
        pairs.append(("update", _show_trial(found.trial, found.revision)))
    pairs += list_events(found, named(found.project, found.name))
    pairs.append(("cost", format_usd(Money(found.spent_micros))))
    if tokens := show_priced_tokens(found.spent_micros, found.tokens):
        pairs.append(("tokens", tokens))
    if apis := show_apis(found.tokens):
        pairs.append(("public APIs", apis))
    return pairs


def _show_models(found: "service_wire.ServedView") -> str:
    from cavvy.capabilities.serving.reach import find_base_url

    at = f"; base_url of OpenAI's clients: {find_base_url(found)}" if found.url else ""
    return ", ".join(found.models) + at


def _list_traffic(traffic: "service_wire.ServiceTrafficView") -> list[tuple[str, str]]:
    shown = [_show_s(each) for each in (traffic.p50_s, traffic.p95_s, traffic.p99_s)]
    pairs = [
        (
            "requests",
            f"{traffic.per_s:.1f}/s, {traffic.waiting} waiting, {traffic.in_flight} in flight; "
            f"{traffic.answered} answered and {traffic.lost} lost since the gateway started",
        ),
        ("answered within", f"p50 {shown[0]}, p95 {shown[1]}, p99 {shown[2]}"),
    ]
    if traffic.unserved:
        late = traffic.unserved - traffic.shed
        told = f"{traffic.shed} at once (429), {late} after they had waited (504)"
        pairs.append(("refused", told))
    if traffic.batches:
        mean = traffic.joined / traffic.batches
        pairs.append(("batches", f"{traffic.batches}, with {mean:.1f} requests on average"))
    return pairs


def _show_fallback(each: "service_wire.FallbackView") -> str:
    from cavvy.domain.units import Money, format_usd

    named = f"{each.name}, model {each.model}" if each.model else each.name
    answered = format_count(each.answered or 0, "answer")
    parts = [named, f"{answered} since the gateway started"]
    parts += [] if each.spent_micros is None else [f"{format_usd(Money(each.spent_micros))} in all"]
    return "; ".join(parts)


def _list_edge(found: "service_wire.ServedView", each: "EdgePathView") -> list[tuple[str, str]]:
    """Return the path over devices and the path over the cloud, with latency and cost."""
    from cavvy.domain.units import Money, format_usd

    where = f"site {each.site}" if each.site else "all sites"
    devices = format_count(each.devices, "device")
    kept = f"; {each.kept} keep their requests (residency)" if each.kept else ""
    lost = f"; {each.lost} lost" if each.lost else ""
    answers = format_count(each.answered, "answer")
    times = f", p50 {_show_s(each.p50_s)}, p95 {_show_s(each.p95_s)}" if each.answered else ""
    spent = f"; {_show_path_cost(each.micros, each.answered, each.window_s)}"
    by_device = f"{answers}{times}{spent if each.devices else ''}"
    by_device += f"; {each.model} on {devices} of {where}"
    by_cloud = f"{format_count(each.cloud_answered, 'failover')}"
    if each.cloud_answered:
        by_cloud += f", p50 {_show_s(each.cloud_p50_s)}, p95 {_show_s(each.cloud_p95_s)}"
    cost = f"; the replicas cost {format_usd(Money(found.spent_micros))} in all"
    if window := each.cloud_window_s:
        cost += f", {_show_path_cost(each.cloud_micros, each.cloud_requests, window)}"
    return [("device path", by_device + kept + lost), ("cloud path", by_cloud + cost)]


def _show_path_cost(micros: int | None, answered: int, window_s: int) -> str:
    """Return what 1,000 answers have cost, or the whole cost if there were none."""
    from datetime import timedelta

    from cavvy.domain.units import Money, format_duration, format_usd

    if micros is None:
        price = "`cavvy edge site SITE --device-usd-hour PRICE`"
        return f"cost unknown until each site has a price ({price}) and devices report their hours"
    period = f"in the last {format_duration(timedelta(seconds=window_s))}"
    if not answered:
        return f"{format_usd(Money(micros), 4)} {period}, without answers"
    each = Money((2 * 1000 * micros + answered) // (2 * answered))
    return f"{format_usd(each, 4)} per 1,000 answers {period}"


_ENDS = {
    "enough": "promoted because it answered enough requests without evidence that this revision "
    "is worse",
    "time": "promoted because the time limit ended without evidence that this revision is worse",
    "ready": "promoted: all replicas of this revision are ready",
    "errors": "rolled back: more requests fail than with the old revision",
    "latency": "rolled back: requests take longer than with the old revision",
    "failed": "rolled back: the replicas of this revision failed",
    "withdrawn": "rolled back: `cavvy serve` was called with the old file",
}


def _show_trial(trial: "service_wire.TrialView", serving: int) -> str:
    said = _ENDS.get(trial.end, trial.end)
    if not trial.end and trial.weight is None:
        said = "takes over when all its replicas are ready"
        if trial.problem:
            said += f"; revision {serving} answers, because the last replica did not start"
    elif not trial.end:
        share = f"{trial.weight}% of the service's requests"
        said = f"gets {share} until it has received {format_count(trial.asked or 0, 'request')}"
    parts = [f"revision {trial.revision} {'was ' if trial.end else ''}{said}"]
    if trial.requests:
        old, new = trial.errors
        evidence = format_number(float(f"{min(trial.evidence, 1e6):.3g}"))
        parts.append(
            f"{format_count(trial.requests, 'request')}: {new:.2%} failed (before: {old:.2%}), "
            f"{trial.slower - 1:+.1%} latency; evidence {evidence} (rolled "
            f"back at {trial.bound:g})"
        )
    if trial.problem:
        parts.append(trial.problem)
    return "; ".join(parts)


def _show_level(asked: "service_wire.LevelView", reached: "service_wire.LevelShares") -> str:
    parts = []
    if asked.availability is not None and reached.availability is not None:
        wanted = _show_share(asked.availability)
        parts.append(f"{_show_share(reached.availability)} answered (wanted: {wanted})")
    if asked.p95_s is not None and reached.in_time is not None:
        parts.append(f"{100 * reached.in_time:.4g}% within {asked.p95_s:g} s (wanted: 95%)")
    if not parts:
        return "not measured yet"
    return f"{', '.join(parts)}; {format_count(reached.requests, 'request')}"


def _show_aim(aim: "service_wire.AimView", most: int) -> str:
    """Return that too few requests are on time, why, and what it takes."""
    from cavvy.cli.view.formatting import show_minute
    from cavvy.domain.units import Money, format_usd

    share, wanted = f"{100 * aim.on_time:.3g}%", f"{100 * aim.aim:.3g}%"
    text = f"{share} of the last hour's requests waited at most {aim.wait_s:g} s; wanted: {wanted}"
    bursts = f"the last {format_count(aim.bursts, 'burst')}"
    bursts += f" had {aim.ratio:.2g} times the usual requests" if aim.ratio else ""
    cost = (
        ""
        if aim.more_micros_hr is None
        else f", which costs {format_usd(Money(aim.more_micros_hr))} an hour more"
    )
    keeps = f"`replicas.min: {aim.needed}` would be enough{cost}"
    start = f"a replica takes {aim.start_s:.2g} s to start"
    match aim.cause:
        case "most":
            return f"{text}; `replicas.max` permits only {most}: {aim.needed} are needed{cost}"
        case "learnt":
            at = "" if aim.next_at is None else f" at {show_minute(aim.next_at)}"
            needed = format_count(aim.needed, "replica")
            return f"{text}; {bursts}, and {needed} start before the next one, expected{at}"
        case "irregular":
            return f"{text}; {bursts} and came at no regular times, and {start}: {keeps}"
    return f"{text}; the requests grow faster than replicas start, and {start}: {keeps}"


def _show_objective(each: "service_wire.ObjectiveView", most: int) -> str:
    """Return what is wanted, and what is expected with which number of replicas."""
    wanted = f"{100 * each.share:g}% within {each.limit_s:g} s"
    if each.needed is None or each.expected_s is None or each.best_s is None:
        return f"{wanted}; not measured yet: the first 20 streamed answers show the model's speed"
    if each.best_s > each.limit_s:
        return (
            f"{wanted}; no number of replicas meets this: the best is {each.best_s:.3g} s, because "
            "of the speed of the model and the lengths of prompts"
        )
    needed = format_count(each.needed, "replica")
    text = f"{wanted}; {each.expected_s:.3g} s expected with {needed}, at best {each.best_s:.3g} s"
    return text if each.needed <= most else f"{text}; `replicas.max` permits only {most}"


def _show_speed(speed: "service_wire.TokenSpeedView") -> str:
    first, more, gap, running = (
        f"{round(1e3 * each, 6):.3g} ms"
        for each in (speed.base_s, speed.prompt_s, speed.gap_s, speed.running_s)
    )
    return (
        f"{first} for a prompt and {more} more for each of its tokens; {gap} between tokens and "
        f"{running} more for each running request; {speed.prompt:,.0f} tokens in a prompt and "
        f"{speed.completion:,.0f} in an answer on average"
    )


def _show_unplaced(found: "service_wire.ServedView", each: "service_wire.UnplacedView") -> str:
    where = " and ".join(each.places)
    return (
        f"no replica starts in {where} for waiting requests ({each.waiting}), because the "
        f"service has its maximum of {format_count(found.most, 'replica')}; raise `replicas.max`, "
        "or stop another "
        f"replica: `cavvy stop {each.instead}`"
    )


def _show_replica(replica: "ReplicaView") -> str:
    reason = f": {replica.reason}" if replica.reason else ""
    where = f" on {replica.place}" if replica.place else ""
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in replica.start_s.items())
    took = f"; start: {parts}" if parts else ""
    if replica.ready_at is None and replica.ended_at is None and "prepare" in replica.start_s:
        took += f"; PORT is {replica.port}"
        took += "" if reason else ", and the program does not answer yet"
    named = dict.fromkeys(filter(None, (replica.group, replica.role)))
    of = f"{', '.join(named)}, " if named else ""
    known = f"{replica.number} ({of}revision {replica.revision})"
    return f"{known} {replica.state}{where}{reason}{took}"


def _show_share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.6g}%"


def _show_s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


@click.group("key", cls=CommandGroup)
def key_command() -> None:
    """Create, list and revoke keys for calls to a service.

    Requests to a service whose file says `keys: true` need a key, as `Authorization: Bearer KEY` or
    `X-API-Key: KEY`. The service's program does not get the key.
    """


@key_command.command("create")
@service_argument
@project_option
@click.option("--label", default="", help="A note that shows what the key is for.")
@positive_option("--rate", help="The maximum number of requests per second with this key.")
@count_option(
    "--burst", help="The number of requests that --rate permits at the same time; the default is 1."
)
@count_option(
    "--tokens-per-minute",
    help="The maximum number of tokens of language models per minute: of prompts and completions.",
)
@click.option(
    "--usd-per-day",
    callback=read_usd,
    metavar="USD",
    help="The maximum cost in dollars of the key's requests on a day in UTC.",
)
@click.option(
    "--weight",
    type=NumberRange(min=0.01, max=100),
    default=1.0,
    help="While requests for a language model wait, keys of one priority are served tokens in "
    "proportion to their weights; the default is 1.",
)
@click.option(
    "--priority",
    type=click.Choice(["low", "normal", "high"]),
    default="normal",
    help="While requests wait, those of keys with a higher priority start first, and those with a "
    "lower one are refused first.",
)
@click.option(
    "--residency",
    metavar="PLACE",
    help="Requests with this key must stay in PLACE, which is an area such as eu or a country "
    "such as de.",
)
@click.option("--expires", default="90d", help="How long the key is valid, or `never`.")
def create_key(
    name: str,
    project: str,
    label: str,
    rate: float | None,
    burst: int | None,
    tokens_per_minute: int | None,
    usd_per_day: int | None,
    weight: float,
    priority: str,
    residency: str | None,
    expires: str,
) -> None:
    """Create a key and print it. The key cannot be shown again."""
    from cavvy.capabilities.serving.wire import ServiceKeyAsk, create_service_key

    ask = ServiceKeyAsk(
        label=label,
        per_s=rate,
        burst=burst or 1,
        tokens_per_min=tokens_per_minute,
        micros_per_day=usd_per_day,
        weight=weight,
        priority=priority,
        residency=residency,
        expires_s=None
        if expires == "never"
        else read_seconds(expires, "--expires", "30d, 12h or never"),
    )
    made = call_server(create_service_key, project, name, ask)
    click.echo(
        f"key {made.view.id} of {name}; save it, because it cannot be shown again:", err=True
    )
    click.echo(made.key)


@key_command.command("list")
@service_argument
@project_option
@output_option
def list_keys(name: str, project: str, output: str) -> None:
    """List the keys of a service."""
    from cavvy.capabilities.serving.wire import list_service_keys
    from cavvy.cli.view import formatting

    rows = call_server(list_service_keys, project, name)

    def uses(name: str) -> bool:
        return any(getattr(each, name) is not None for each in rows)

    columns = [
        TableColumn("id"),
        TableColumn("label", wrap=True),
        TableColumn("user", drop=3),
        TableColumn("per_s", "REQ/S", drop=4),
        TableColumn("burst", hidden=True),
        TableColumn(
            "tokens_per_min", "TOKENS/MIN", "{:,}".format, hidden=not uses("tokens_per_min")
        ),
        TableColumn(
            "micros_per_day", "A DAY", formatting.show_money, hidden=not uses("micros_per_day")
        ),
        TableColumn("weight", hidden=all(each.weight == 1 for each in rows)),
        TableColumn("priority", hidden=all(each.priority == "normal" for each in rows)),
        TableColumn("residency", "STAYS IN", drop=3),
        TableColumn("created_at", "CREATED", formatting.show_ago, drop=3),
        TableColumn("used_at", "USED", formatting.show_ago, drop=2),
        TableColumn("expires_at", "EXPIRES", formatting.show_time, drop=1),
    ]
    empty = f"no keys; `cavvy services key create {name}` creates a key"
    rows_out(columns, rows, output, empty=empty)


@key_command.command("revoke")
@service_argument
@click.argument("key_id", metavar="ID")
@project_option
def revoke_key(name: str, key_id: str, project: str) -> None:
    """Revoke a key immediately."""
    from cavvy.capabilities.serving.wire import revoke_service_key

    call_server(revoke_service_key, project, name, key_id)
    click.echo(f"key {key_id} of {name} is revoked")


def list_events(found: "service_wire.ServedView", there: str) -> list[tuple[str, str]]:
    """Return pairs of heading and text. `there` contains the command-line arguments that name the
    service.
    """
    pairs = [("webhook", f"{each.name}: {describe_webhook(each)}") for each in found.webhooks]
    pairs += [("cron", _describe_cron(each)) for each in found.crons]
    queue = _describe_queue(found.queue, there)
    return [*pairs, ("queue", queue)] if queue else pairs


def describe_webhook(hook: "service_wire.WebhookView") -> str:
    text = f"POST {hook.url} (signature {hook.signature})"
    if hook.url.startswith("/"):
        text += "; other systems cannot reach the webhook until server.listen is set"
    return text


def _describe_cron(each: "service_wire.CronView") -> str:
    from cavvy.cli.view.formatting import show_time

    text = f"{each.cron} ({each.time_zone}) calls {each.path}"
    return text if each.next_at is None else f"{text}; next at {show_time(each.next_at)}"


def _describe_queue(queue: "service_wire.QueueView | None", there: str) -> str:
    """Return the counts of the queue, or "" if the queue has no calls."""
    if queue is None or not (queue.waiting or queue.done or queue.dead):
        return ""
    waiting = f"{queue.waiting} waiting"
    if queue.running:
        waiting += f" ({queue.running} of them running)"
    text = f"{waiting}, {queue.done} done, {queue.dead} dead"
    if queue.dead:
        text += f"; see `cavvy services queue list {there} --state dead`"
    return text
