"""`cavvy project policy` and `cavvy project shares`: manage restrictions on the jobs of a project
and its share of the queue, and show the queue by project.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cavvy.cli.reach.session import call_server, find_project_note, project_option, session
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out, text_out

if TYPE_CHECKING:
    from cavvy.client.policy_wire import ProjectPolicyView, UserLimitsView


_ANY = "any"  # the value of an option that removes its restriction
# options: numbers, numbers of GPUs with their fields in the policy, and prices with theirs
_NUMBERS = ("share", "user_jobs", "user_waiting")
_GPUS = {
    "quota": ("quota_gpus", "quota_accelerators"),
    "max_gpus": ("max_gpus", "max_accelerators"),
    "user_gpus": ("user_gpus", "user_accelerators"),
}
_PRICES = {f"{name}_spend": f"{name}_micros_per_hour" for name in ("quota", "max", "user")}
_PRICES["max_price"] = "max_rate_micros_per_hour"
_NUMBER = r"[0-9]{1,7}([.][0-9]{1,6})?"
_everywhere = click.option(
    "--all-projects", is_flag=True, help="The policy of the server, which applies to all projects."
)


@click.group("policy", cls=CommandGroup)
def command() -> None:
    """Restrict the resources that the jobs of a project may use.

    A policy also applies to all subprojects. A job must satisfy the policies of its project, of all
    parent projects and of the server. Policies apply whenever Cavvy chooses an offer for a job;
    running jobs continue.
    """


@command.command("show")
@project_option
@_everywhere
@output_option
def show(project: str, all_projects: bool, output: str) -> None:
    """Show the policies that apply to a project's jobs, with the project's own policy last."""
    from cavvy.client.policy_wire import list_policies

    found = call_server(list_policies, None if all_projects else project)
    if output == "json":
        from msgspec import to_builtins

        from cavvy.cli.view.output import json_out

        json_out([to_builtins(each) for each in found])
        return
    rows = [(each.project or "(server)", *line) for each in found for line in _describe(each)]
    columns = [TableColumn("project", "POLICY OF"), TableColumn("what"), TableColumn("only")]
    empty = "no policy applies" if all_projects else f"no policy applies to project {project}"
    rows_out(columns, rows, output, empty=empty)


@command.command("set")
@project_option
@_everywhere
@click.option("--providers", metavar="NAMES", help="Permit only these providers, such as aws,gcp.")
@click.option("--regions", metavar="NAMES", help="Permit only these regions, such as eu,us-east-1.")
@click.option("--gpus", metavar="NAMES", help="Permit only these GPUs, such as H100,A100.")
@click.option("--max-price", metavar="USD", help="The highest price of a node per hour.")
@click.option(
    "--images", metavar="NAMES", help="Permit only these container images, such as ghcr.io/acme/*."
)
@click.option(
    "--image-digests/--no-image-digests",
    default=None,
    help="Whether images must be named by their digest.",
)
@click.option(
    "--signed-by", metavar="FILES", help="Public keys, such as cosign.pub, that must sign images."
)
@click.option(
    "--keep-jobs",
    metavar="DAYS",
    help="Days for which ended jobs are kept; 0 keeps them forever. Unlike the other options, this "
    "one replaces the value of the parent project and of the server.",
)
@click.option(
    "--share",
    metavar="WEIGHT",
    help="The project's share in the queue, compared with the projects beside it; 1 without this "
    "option.",
)
@click.option(
    "--quota",
    metavar="GPUS",
    help="GPUs up to which the project's jobs go first, such as 16, H100=8,A100=16 or 24,H100=8.",
)
@click.option(
    "--quota-spend", metavar="USD", help="Dollars an hour up to which the project's jobs go first."
)
@click.option(
    "--max-gpus", metavar="GPUS", help="The most GPUs in use at the same time, such as 64,H100=8."
)
@click.option("--max-spend", metavar="USD", help="The most that all nodes cost per hour.")
@click.option(
    "--user-gpus", metavar="GPUS", help="The most GPUs in use by each user, such as 8,H100=2."
)
@click.option("--user-spend", metavar="USD", help="The most that each user's nodes cost per hour.")
@click.option(
    "--user",
    metavar="NAME",
    help="Let the other options whose names begin with --user- apply to this user, instead of the "
    "limits of each user. If all of them are `any`, the user has the limits of each user again.",
)
@click.option("--user-jobs", metavar="JOBS", help="The most running jobs of each user.")
@click.option("--user-waiting", metavar="JOBS", help="The most waiting jobs of each user.")
@click.option("-y", "--yes", is_flag=True, help="Also set limits and quotas below what is in use.")
def set_policy(
    project: str,
    all_projects: bool,
    image_digests: bool | None,
    user: str | None,
    yes: bool,
    **texts: str | None,
) -> None:
    """Change the policy of a project. Each option replaces one restriction, and its value `any`
    removes the restriction. Restrictions without an option stay unchanged.

    To lower a limit or a quota below what the project or a user holds now is refused without
    --yes.
    """
    from msgspec.structs import asdict

    from cavvy.client.policy_wire import PolicyAsk, list_policies, put_policy
    from cavvy.domain.units import format_count

    where = _read_where(project, everywhere=all_projects)
    changes = _read_changes(texts, image_digests, user)
    with session() as client:
        own = [each for each in list_policies(client, where) if each.project == (where or "")]
        before = asdict(own[0]) if own else {}
        before.pop("project", None)
        if user is not None:
            changes = {"users": _change_user(before.get("users", {}), user, changes)}
        ask = PolicyAsk(**{**before, **changes})
        exceeded = put_policy(client, where, ask, accept_exceeded=yes)
        undo = f"`cavvy project policy delete -p {where}` deletes the policy"
        note = find_project_note(client, where, undo)
        begin = client.server().removes_old_from if changes.get("keep_jobs_days") else None
    click.echo(f"the policy of {_say(where)} is set")
    if exceeded:
        note_out(exceeded)
    if note:
        click.echo(note, err=True)
    _note_unknown(changes.get("regions", ()))
    if days := changes.get("keep_jobs_days"):
        when = f"from {begin:%Y-%m-%d %H:%M} UTC on" if begin else "within hours"
        note_out(
            f"the server will remove jobs that ended more than {format_count(days, 'day')} "
            f"ago, with their logs and checkpoints, {when}; their costs stay"
        )


def _read_changes(
    texts: Mapping[str, str | None], image_digests: bool | None, user: str | None
) -> dict[str, Any]:
    """Return the fields of the policy that the options replace. Raises CommandFailure."""
    changes: dict[str, Any] = {}
    for name, text in texts.items():
        if text is not None:
            changes |= _read_option(name, text)
    if image_digests is not None:
        changes["image_digests"] = image_digests
    if not changes:
        raise CommandFailure(
            "no restriction is named",
            "give at least one restriction, such as --regions eu; see --help",
            exit_code=2,
        )
    if user is not None and (other := [each for each in changes if not each.startswith("user_")]):
        option = "gpus" if other[0] == "accelerators" else other[0].replace("_", "-")
        raise CommandFailure(
            f"--user {user} is given, but {option} does not belong to one user",
            "with --user, give only options that begin with --user-",
            exit_code=2,
        )
    return changes


@command.command("delete")
@project_option
@_everywhere
def delete(project: str, all_projects: bool) -> None:
    """Delete the policy of a project. The policies of the parent projects still apply."""
    from cavvy.client.policy_wire import delete_policy

    where = _read_where(project, everywhere=all_projects)
    call_server(delete_policy, where)
    click.echo(f"{_say(where)} has no policy of its own")


def _change_user(
    users: Mapping[str, "UserLimitsView"], user: str, changes: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the limits of all users after these changes of one user's."""
    from cavvy.client.policy_wire import UserLimitsView
    from cavvy.domain.values import replace

    own = {name.removeprefix("user_"): value for name, value in changes.items()}
    return {**users, user: replace(users.get(user, UserLimitsView()), **own)}


def _read_where(project: str, *, everywhere: bool) -> str | None:
    """Return the name of the project, or None for the policy of the server."""
    from click.core import ParameterSource

    source = click.get_current_context().get_parameter_source("project")
    if everywhere and source is ParameterSource.COMMANDLINE:
        raise CommandFailure(
            "--project and --all-projects are both given", "give one of them", exit_code=2
        )
    return None if everywhere else project


def _say(where: str | None) -> str:
    return "the server" if where is None else f"project {where}"


def _read_names(option: str, text: str) -> list[str]:
    """Return the names in `text`, or [] for `any`. An empty text, for example from a variable that
    is not set, is an error, because it must not remove a restriction.
    """
    names = [each.strip() for each in text.split(",")]
    if not all(names):
        raise CommandFailure(
            f"--{option} {text!r}: one of the names is empty",
            f"write names with commas between them, or `any` to permit all {option}",
            exit_code=2,
        )
    return [] if names == [_ANY] else names


def _read_key(file: str) -> str:
    """Read a file with a public key, and return its text."""
    if "://" in file or "@" in file:
        raise CommandFailure(
            f"--signed-by {file!r} is not a file; keyless signatures, which have an identity "
            "instead of a key, are not supported",
            "sign with a key: `cosign generate-key-pair` writes cosign.pub",
            exit_code=2,
        )
    try:
        return Path(file).read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        hint = "name the file with the public key, such as cosign.pub"
        raise CommandFailure(f"--signed-by {file}: {error}", hint, exit_code=2) from error


def _note_unknown(regions: Sequence[str]) -> None:
    """Print a note for each region that the catalog does not have, because a misspelt region
    prevents all jobs from starting.
    """
    from cavvy.catalog.regions import is_known_place, is_region
    from cavvy.store.snapshot import CatalogSnapshot

    with CatalogSnapshot.open() as snapshot:
        listed = [(provider, region) for provider, region, _ in snapshot.regions()]
    for name in regions:
        if not is_known_place(name) and not any(is_region(name, *each, None) for each in listed):
            note_out(
                f"the catalog has no region {name!r}; jobs can start only if a provider that "
                "is not in the catalog has this region"
            )


def _read_option(name: str, text: str) -> dict[str, Any]:
    """Return the fields of the policy that an option changes."""
    if name in _GPUS:
        return dict(zip(_GPUS[name], _read_gpus(name, text), strict=True))
    if name in _PRICES:
        return {_PRICES[name]: _read_price(name.replace("_", "-"), text)}
    if name in _NUMBERS:
        return {name: _read_number(name, text)}
    if name == "signed_by":
        return {name: [_read_key(each) for each in _read_names("signed-by", text)]}
    if name == "keep_jobs":
        return {"keep_jobs_days": _read_days(text)}
    return {"accelerators" if name == "gpus" else name: _read_names(name, text)}


def _read_gpus(name: str, text: str) -> tuple[float | None, dict[str, float]]:
    """Return the number of all GPUs, if `text` has one, and the numbers by accelerator."""
    if text == _ANY:
        return None, {}
    option = name.replace("_", "-")
    example = f"for example --{option} 16, --{option} H100=8,A100=16, or `any` to remove the value"
    total, found = None, dict[str, float]()
    for part in text.split(","):
        accelerator, equals, number = part.strip().rpartition("=")
        accelerator = accelerator.strip()
        if not re.fullmatch(_NUMBER, number.strip()) or bool(equals) != bool(accelerator):
            what = "is neither a number from 0 to 1,000,000 nor ACCELERATOR=NUMBER"
            raise CommandFailure(f"--{option}: {part.strip()!r} {what}", example, exit_code=2)
        if accelerator in found or (not equals and total is not None):
            what = accelerator or "the number of all GPUs"
            raise CommandFailure(f"--{option} has {what} twice", example, exit_code=2)
        if equals:
            found[accelerator] = float(number)
        else:
            total = float(number)
    return total, found


def _read_price(option: str, text: str) -> int | None:
    """Return the price in micro-dollars, or None for `any`."""
    from cavvy.domain.units import UnitError, parse_rate

    if text == _ANY:
        return None
    try:
        return parse_rate(text).micros_per_hour
    except UnitError as error:
        hint = f"for example --{option} 12.50"
        raise CommandFailure(f"--{option}: {error}", hint, exit_code=2) from error


def _read_days(text: str) -> int | None:
    if text == _ANY:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise CommandFailure(
            f"--keep-jobs: {text!r} is not a whole number of days from 0 to 36500",
            "for example --keep-jobs 30, or `any` to use the value of the server",
            exit_code=2,
        )
    return int(text)


def _read_number(name: str, text: str) -> float | int | None:
    """Return the number, or None for `any`."""
    option, whole = name.replace("_", "-"), name != "share"
    if text == _ANY:
        return None
    if not re.fullmatch(r"[0-9]{1,7}" if whole else _NUMBER, text):
        what = "whole number" if whole else "number"
        raise CommandFailure(
            f"--{option}: {text!r} is not a {what} from 0 to 1,000,000",
            f"for example --{option} 4, or `any` to remove the value",
            exit_code=2,
        )
    return int(text) if whole else float(text)


def _describe(policy: "ProjectPolicyView") -> Iterator[tuple[str, str]]:
    from cavvy.domain.policies import name_key

    for name, values in (
        ("providers", policy.providers),
        ("regions", policy.regions),
        ("GPUs", policy.accelerators),
        ("images", policy.images),
    ):
        if values:
            yield name, ", ".join(values)
    if policy.image_digests:
        yield "images", "named by their digest"
    for key in policy.signed_by:
        yield "images", f"signed with the key {name_key(key)}"
    if policy.max_rate_micros_per_hour is not None:
        from cavvy.domain.units import format_price

        yield "nodes", f"up to {format_price(policy.max_rate_micros_per_hour / 1e6)} per hour"
    if policy.keep_jobs_days is not None:
        yield "ended jobs", _say_days(policy.keep_jobs_days)
    yield from _describe_queue(policy)


def _describe_queue(policy: "ProjectPolicyView") -> Iterator[tuple[str, str]]:
    from cavvy.domain.policies import say_amount

    if policy.share is not None:
        yield "queue", f"share {policy.share:g}"
    quota = policy.quota_gpus, policy.quota_accelerators, policy.quota_micros_per_hour
    most = policy.max_gpus, policy.max_accelerators, policy.max_micros_per_hour
    user = policy.user_gpus, policy.user_accelerators, policy.user_micros_per_hour
    for name, words, (total, by_accelerator, micros) in (
        ("queue", "first up to {}", quota),
        ("in use", "at most {}", most),
        ("in use", "at most {} of each user", user),
    ):
        for kind, amount in {"": total, **by_accelerator, "$": micros}.items():
            if amount is not None:
                yield name, words.format(say_amount(kind, amount))
    for name, value in (("running", policy.user_jobs), ("waiting", policy.user_waiting)):
        if value is not None:
            yield name, f"at most {value} jobs of each user"
    for who, own in sorted(policy.users.items()):
        amounts = {"": own.gpus, **own.accelerators, "$": own.micros_per_hour}
        for kind, amount in amounts.items():
            if amount is not None:
                yield "in use", f"at most {say_amount(kind, amount)} of {who}"
        for name, value in (("running", own.jobs), ("waiting", own.waiting)):
            if value is not None:
                yield name, f"at most {value} jobs of {who}"


def _say_days(days: int) -> str:
    from cavvy.domain.units import format_count

    return f"kept for {format_count(days, 'day')}" if days else "kept forever"


def _percent(part: float) -> str:
    return f"{part:.1%}"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


def _amounts(total: float | None, by_accelerator: Mapping[str, float], micros: int | None) -> str:
    """Return a quota or a limit in one cell."""
    from cavvy.domain.policies import say_amount

    parts = [f"{number:g} {name}" for name, number in by_accelerator.items()]
    parts = [*([] if total is None else [f"{total:g}"]), *parts]
    return ", ".join([*parts, *([] if micros is None else [say_amount("$", micros)])])


def _loans(loans: Sequence[Mapping[str, Any]], direction: str) -> str:
    """Return loans in one cell, such as `4 H100 to vision`."""
    from cavvy.domain.policies import say_amount

    parts = []
    for each in loans:
        in_dollars = each["micros_per_hour"] or not each["gpus"]
        name, amount = ("$", each["micros_per_hour"]) if in_dollars else ("", each["gpus"])
        said = say_amount(each["accelerator"] or name, amount)
        parts.append(f"{said} {direction} {each['project']}")
    return ", ".join(parts)


# JSON and CSV have these fields, and tables the columns
_FIELDS = (
    *("project", "parent", "weight", "part", "used_part", "used_gpu_hours", "debt_gpu_hours"),
    *("gpus", "accelerators", "jobs", "micros_per_hour", "quota_gpus", "quota_accelerators"),
    *("quota_micros_per_hour", "max_gpus", "max_accelerators", "max_micros_per_hour"),
    *("waiting_gpus", "waiting_jobs", "lent", "borrowed"),
)
_COLUMNS = (
    TableColumn("project"),
    TableColumn("weight", show=_number, drop=2),
    TableColumn("part", "SHARE", show=_percent),
    TableColumn("used_part", "USED", show=_percent),
    TableColumn("used_gpu_hours", "GPU-HOURS", show=lambda hours: f"{hours:,.1f}", drop=3),
    TableColumn(
        "debt_gpu_hours", "DEBT", show=lambda hours: f"{round(hours, 1) + 0:+,.1f}", drop=6
    ),
    TableColumn("gpus", "GPUS", show=_number),
    TableColumn("jobs", drop=4),
    TableColumn("micros_per_hour", "$/H", show=lambda micros: f"{micros / 1e6:,.2f}", drop=7),
    TableColumn("quota"),
    TableColumn("limit", drop=1),
    TableColumn("lent", drop=8),
    TableColumn("borrowed", drop=9),
    TableColumn("waiting_gpus", "WAITING", show=_number),
    TableColumn("waiting_jobs", "JOBS WAITING", drop=5),
)


@click.command("shares")
@click.option("-p", "--project", help="Show only this project.")
@output_option
def shares_command(project: str | None, output: str) -> None:
    """Show the queue by project: its share, its use, and what it holds and waits for.

    SHARE is the part of all use that a project should have by its weight, USED the part that it
    has. The project that has used least for its weight has the next turn. Past use decays by half
    in the time that `queue.half_life_days` sets. `cavvy project policy set --share 2` changes a
    weight. DEBT are the GPU-hours that it has used beyond its share; below 0, other projects have.
    LENT is what others hold of its quota, and BORROWED what it holds of theirs.
    """
    from msgspec import to_builtins

    from cavvy.client.queue_wire import read_shares

    report = call_server(read_shares, project)
    rows = [to_builtins(each) for each in report.projects]
    for row, each in zip(rows, report.projects, strict=True):
        quota = each.quota_gpus, each.quota_accelerators, each.quota_micros_per_hour
        limit = each.max_gpus, each.max_accelerators, each.max_micros_per_hour
        row |= {"quota": _amounts(*quota), "limit": _amounts(*limit)}
        if output == "table":
            row |= {"lent": _loans(row["lent"], "to"), "borrowed": _loans(row["borrowed"], "of")}
    columns = _COLUMNS if output == "table" else _FIELDS
    rows_out(columns, rows, output, empty="no project uses or wants anything")
    if output == "table" and any(each.waiting_jobs for each in report.projects):
        text_out("`cavvy status JOB` shows a job's position in the queue")
