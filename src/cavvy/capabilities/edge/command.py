"""`cavvy edge`: enrols devices at the edge, and rolls models out to them."""

import getpass
import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.capabilities.models.wheels import collect_wheels, packages_options
from cavvy.cli.reach.session import any_project_option, call_server, project_option, session
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import NumberRange, count_option, read_length
from cavvy.cli.view.output import (
    TableColumn,
    json_option,
    output_option,
    pairs_out,
    rows_out,
)

if TYPE_CHECKING:
    from cavvy.capabilities.edge.wire import (
        DeviceSettingsView,
        DeviceView,
        RolloutView,
        SettingsAsk,
        SettingsView,
        SiteView,
    )
    from cavvy.client import ApiClient

_PATIENCE_S = 180.0  # two check-ins, and a command of a minute
_WINDOW = re.compile(r"([01]?\d|2[0-4])-([01]?\d|2[0-4])")
_CLOUD_INIT = """\
#cloud-config
packages: [curl, python3-venv]
write_files:
- path: /usr/local/sbin/cavvy-edge
  permissions: '0700'
  content: |
    #!/bin/sh
    export CAVVY_EDGE_FOLDER=/var/lib/cavvy-edge
    [ ! -f $CAVVY_EDGE_FOLDER/card.json ] || exec $CAVVY_EDGE_FOLDER/start
    {command}
- path: /etc/systemd/system/cavvy-edge.service
  content: |
    [Unit]
    Wants=network-online.target
    After=network-online.target
    [Service]
    ExecStart=/usr/local/sbin/cavvy-edge
    Restart=always
    RestartSec=10
    [Install]
    WantedBy=multi-user.target
runcmd:
- systemctl enable --now cavvy-edge"""
_label_option = click.option(
    "--label", "labels", multiple=True, metavar="NAME=VALUE", help="A label; repeatable."
)


@click.group("edge", cls=CommandGroup)
def command() -> None:
    """Serve models on devices that are often offline.

    A device connects to the server; the server never connects to a device. `cavvy model publish`
    publishes a model, and `cavvy edge deploy` brings it to devices wave by wave.
    """


@command.command("token")
@project_option
@click.option("--site", required=True, help="Where the devices are, such as lyon.")
@count_option("--count", most=100_000, default=1, help="How many devices may use the token.")
@click.option("--valid", default="24h", metavar="TIME", help="How long the token is valid.")
@click.option("--allow-exec", is_flag=True, help="Let `cavvy edge exec` run commands on them.")
@click.option("--cloud-init", is_flag=True, help="Print the user data of an image instead.")
@_label_option
@json_option
def token(
    project: str,
    site: str,
    count: int,
    valid: str,
    allow_exec: bool,
    cloud_init: bool,
    labels: tuple[str, ...],
    output: str,
) -> None:
    """Print the shell command that enrols a device. Each device can use the token once.

    With --cloud-init, print a file for cloud-init, such as `user-data` on the SD card of a
    Raspberry Pi: a service of systemd enrols the device at its first start with a network, and
    runs its program from then on. It has the token, so keep it as a secret.
    """
    from cavvy.capabilities.edge.wire import EnrolmentAsk, invite_devices

    if cloud_init and output == "json":
        raise CommandFailure("--cloud-init prints no JSON; leave one of them out", exit_code=2)
    ask = EnrolmentAsk(
        site=site,
        count=count,
        labels=_read_labels(labels),
        valid_s=read_length(valid, "--valid").total_seconds(),
        allow_exec=allow_exec,
    )
    made = call_server(invite_devices, project, ask)
    if output == "json":
        from cavvy.cli.view.output import json_out

        json_out(made)
        return
    click.echo(_CLOUD_INIT.format(command=made.command) if cloud_init else made.command)
    devices = "one device" if count == 1 else f"{count:,} devices"
    click.echo(f"valid for {devices} until {formatting.show_time(made.expires_at)}", err=True)


@command.command("list")
@any_project_option
@output_option
def list_all(project: str | None, output: str) -> None:
    """List devices and what they serve."""
    from datetime import UTC, datetime

    from cavvy.capabilities.edge.wire import list_devices
    from cavvy.capabilities.models.model_keys import list_expiring

    with session() as client:
        found = list_devices(client, project)
        now = datetime.now(UTC)
        notes = [
            note
            for each in sorted({each.project for each in found})
            for note in list_expiring(client, each, now)
        ]
    rows = [
        {
            "name": each.name,
            "project": each.project,
            "site": each.site,
            "state": each.state,
            "models": _say_models(each),
            "heard_at": each.heard_at,
            "requests": sum(model.requests for model in each.models),
            "problem": "; ".join(
                filter(None, [*(model.problem for model in each.models), each.settings_problem])
            ),
        }
        for each in found
    ]
    columns = [
        TableColumn("name"),
        TableColumn("project", drop=2),
        TableColumn("site"),
        TableColumn("state"),
        TableColumn("models", wrap=True),
        TableColumn("requests", drop=3),
        TableColumn("heard_at", "HEARD", formatting.show_time, drop=4),
        TableColumn("problem", drop=1, cut=True),
    ]
    rows_out(columns, rows, output, empty="no devices; `cavvy edge token --site NAME` enrols some")
    for note in notes:
        note_out(note)


@command.command("show")
@click.argument("name")
@project_option
@json_option
def show(name: str, project: str, output: str) -> None:
    """Show a device: its hardware, its models, its disk, its clock and its settings.

    Each setting has what it was set for, such as site/lyon. Of a secret, only the name is shown.
    """
    from cavvy.capabilities.edge.wire import get_device, get_device_settings

    with session() as client:
        found = get_device(client, project, name)
        settings = get_device_settings(client, project, name)
    if output == "json":
        from msgspec import to_builtins

        from cavvy.cli.view.output import json_out

        json_out({**to_builtins(found), "settings": to_builtins(settings)})
        return
    pairs: dict[str, object] = {
        "device": found.name,
        "site": found.site,
        "state": found.state,
        "models": _say_models(found) or "none",
        "enrolled": formatting.show_time(found.enrolled_at),
        "heard": formatting.show_time(found.heard_at) if found.heard_at else "never",
        "free disk": f"{found.free_mib:,} MiB",
        "clock": f"{round(found.skew_s):+d} s"
        + (" (wrong: signed lists seem expired or valid for longer)" * (abs(found.skew_s) > 300)),
        "labels": ", ".join(f"{key}={value}" for key, value in found.labels.items()) or "none",
        **found.facts,
    }
    for each in found.models:
        pairs[each.name] = f"{each.requests:,} requests, {each.errors:.1%} failed"
        if each.problem:
            again = f"cavvy edge deploy {each.name}@{each.refused}"
            refused = f"@{each.refused} is refused (`{again}` tries it again): "
            refused = refused if each.refused else ""
            pairs[f"{each.name} problem"] = refused + each.problem
    pairs_out([*pairs.items(), *_list_settings(settings, heard=found.heard_at is not None)])


def _list_settings(found: "DeviceSettingsView", *, heard: bool) -> list[tuple[str, object]]:
    if found.used is None and heard:
        told = "its program is too old for settings: `cavvy edge deploy cavvy.edge`"
    elif found.used == found.revision:
        told = f"revision {found.revision} is used"
    else:
        told = f"revision {found.revision or 'none'}; the device uses {found.used or 'none'}"
    rows: list[tuple[str, object]] = []
    if found.settings or found.used:
        rows.append(("settings", told))
    if found.problem:
        # a device may be hostile: its text must not control the terminal
        rows.append(("settings problem", "".join(map(_printable, found.problem))))
    for each in found.settings:
        value = f"{each.name}={each.value}" if each.kind != "secret" else f"secret {each.name}"
        gone = " (the project does not have it any more)" * each.missing
        rows.append((f"  of {each.source}", value + gone))
    return rows


_settings_options = (
    click.option("--site", default="", help="For the devices of this site."),
    click.option("--label", default="", metavar="NAME=VALUE", help="For those with this label."),
)


@command.command("set")
@click.argument("words", nargs=-1, metavar="[DEVICE] [KEY=VALUE]...")
@project_option
@_settings_options[0]
@_settings_options[1]
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="NAME",
    help="A secret of the project; repeatable.",
)
@output_option
def set_settings(
    words: tuple[str, ...],
    project: str,
    site: str,
    label: str,
    secrets: tuple[str, ...],
    output: str,
) -> None:
    """Set options and variables of devices: of one, of a site, or of those with a label.

    Without KEY=VALUE and --secret, show what is set.

    \b
    Options of the devices' program:
      every_s      seconds between two check-ins, 10 to 480
      look_s       seconds between two looks at the engines, 0.1 to 60
      probation_s  seconds that a trial of a model lasts at least, 0 to 86,400
      spool_mib    most MiB of samples that wait for the server, 1 to 65,536
      share        where others of the site take files from it, such as 0.0.0.0:8090; "" ends it

    A KEY in capital letters is a variable for the engines of models and their cavvy_process.py.
    --secret gives them a secret of the project (`cavvy secret set`) as a variable of this name.
    PATH and others by which programs load code are refused.

    What is set for a device precedes what is set for its label, and that what is set for its site.
    Devices get it at their next check-in, and keep it when they are offline. If variables change,
    they restart their engines, the new one before the former one ends. If an engine does not get
    ready, a device keeps its former settings, and `cavvy edge show` says why; but the former value
    of a secret that was deleted or set anew goes in any case. The edge.json on a device precedes
    `share`, and with "managed": false it refuses all.
    """
    from cavvy.capabilities.edge.wire import change_settings, list_settings

    device, pairs = _split_words(words)
    if not pairs and not secrets:
        with session() as client:
            found = list_settings(client, project)
        shown = [each for each in found if _is_meant(each, device, site, label)]
        _print_settings(shown, output)
        return
    if output != "table":
        raise CommandFailure("--output is for showing what is set", exit_code=2)
    ask = _make_ask(device, site, label, pairs, secrets, ())
    with session() as client:
        _say_settings(change_settings(client, project, ask))


@command.command("unset")
@click.argument("words", nargs=-1, required=True, metavar="[DEVICE] KEY...")
@project_option
@_settings_options[0]
@_settings_options[1]
def unset_settings(words: tuple[str, ...], project: str, site: str, label: str) -> None:
    """Remove options, variables and secrets that `cavvy edge set` has set.

    A device then gets what is set for its label or site, or its own option.
    """
    from cavvy.capabilities.edge.wire import change_settings

    device, keys = ("", words) if site or label else (words[0], words[1:])
    if not keys:
        raise CommandFailure("nothing to unset: name a KEY, such as every_s", exit_code=2)
    ask = _make_ask(device, site, label, {}, (), keys)
    with session() as client:
        _say_settings(change_settings(client, project, ask))


def _split_words(words: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Return the device, or "", and the pairs."""
    device, rest = (words[0], words[1:]) if words and "=" not in words[0] else ("", words)
    if wrong := next((each for each in rest if "=" not in each), None):
        raise CommandFailure(f"{wrong}: expected KEY=VALUE", exit_code=2)
    pairs = dict(each.split("=", 1) for each in rest)
    if len(pairs) < len(rest):
        raise CommandFailure("a KEY is given twice", exit_code=2)
    return device, pairs


def _make_ask(
    device: str,
    site: str,
    label: str,
    values: dict[str, str],
    secrets: tuple[str, ...],
    unset: tuple[str, ...],
) -> "SettingsAsk":
    from cavvy.capabilities.edge.wire import SettingsAsk

    if sum(map(bool, (device, site, label))) != 1:
        told = "name a DEVICE, or --site NAME, or --label NAME=VALUE: one of them"
        raise CommandFailure(told, exit_code=2)
    _read_labels((label,) if label else ())
    return SettingsAsk(
        device=device,
        site=site,
        label=label,
        values=values,
        secrets=list(secrets),
        unset=list(unset),
    )


def _is_meant(row: "SettingsView", device: str, site: str, label: str) -> bool:
    return not (device or site or label) or (row.device, row.site, row.label) == (
        device,
        site,
        label,
    )


def _print_settings(found: "list[SettingsView]", output: str) -> None:
    rows = [
        {
            "for": _say_selector(each),
            "project": each.project,
            "devices": each.devices,
            "settings": ", ".join(
                [
                    *(f"{name}={value}" for name, value in each.values.items()),
                    *(f"secret {name}" for name in each.secrets),
                ]
            ),
        }
        for each in found
    ]
    columns = [
        TableColumn("for"),
        TableColumn("project", drop=1),
        TableColumn("devices"),
        TableColumn("settings", wrap=True),
    ]
    rows_out(columns, rows, output, empty="nothing is set; see `cavvy edge set --help`")


def _say_selector(row: "SettingsView") -> str:
    if row.device:
        return f"device {row.device}"
    return f"site {row.site}" if row.site else f"label {row.label}"


def _say_settings(made: "SettingsView") -> None:
    names = ", ".join([*made.values, *made.secrets]) or "nothing"
    devices = "1 device" if made.devices == 1 else f"{made.devices:,} devices"
    click.echo(f"{_say_selector(made)}: {names} set, for {devices} at the next check-in")
    if made.too_old:
        told = f"note: {made.too_old:,} of them run a program that is too old for settings"
        click.echo(f"{told}; bring the newest: cavvy edge deploy cavvy.edge", err=True)


@command.command("site")
@click.argument("name", metavar="SITE")
@project_option
@click.option("--mib-per-s", type=NumberRange(0.01, 1e6), help="All its devices' downloads.")
@click.option("--window", default="", metavar="HOURS", help="Hours to update in, such as 1-5.")
@click.option("--no-limits", is_flag=True, help="Remove the limits.")
@click.option("--device-usd-hour", default="", metavar="USD|none", help="What each device costs.")
def site(
    name: str,
    project: str,
    mib_per_s: float | None,
    window: str,
    no_limits: bool,
    device_usd_hour: str,
) -> None:
    """Set limits for all devices of a site together; of limits, what is not given has none then.
    Without options, show them.

    --device-usd-hour is the price of a device in dollars an hour, such as 0.012 for hardware,
    network and energy. It stays until it is set again; `none` removes it. `cavvy services show`
    compares the cost of 1,000 answers of a service's devices and replicas.

    Each server keeps the devices of the site below --mib-per-s together, also devices that do not
    keep to it themselves, and models of all rollouts come in the hours of --window only. A fetch
    that the end of these hours cuts goes on in the next ones. The hours are those of the device's
    clock. `cavvy edge sites` lists the limits.
    """
    from msgspec import UNSET

    from cavvy.capabilities.edge.wire import SiteAsk, SiteView, limit_site, list_sites

    ask = SiteAsk(mib_per_s=mib_per_s, window=_read_window(window))
    limits = no_limits or ask != SiteAsk()
    if no_limits and ask != SiteAsk():
        raise CommandFailure("--no-limits goes with no other limit", exit_code=2)
    price = _read_price(device_usd_hour)
    with session() as client:
        none = SiteView(project=project, name=name, mib_per_s=None, window=None)
        made = {each.name: each for each in list_sites(client, project)}.get(name, none)
        if limits or device_usd_hour:
            fresh = SiteAsk(
                mib_per_s=ask.mib_per_s if limits else made.mib_per_s,
                window=ask.window if limits else made.window,
                device_micros_per_hour=price if device_usd_hour else UNSET,
            )
            made = limit_site(client, project, name, fresh)
    rate, hours = _say_limits(made)
    told = f"site {made.name}: {rate} for all its devices, updates at {hours}"
    click.echo(f"{told}, {_say_price(made)}")


@command.command("sites")
@any_project_option
@output_option
def sites(project: str | None, output: str) -> None:
    """List sites with their devices, limits and prices."""
    from cavvy.capabilities.edge.wire import SiteView, list_devices, list_sites

    with session() as client:
        limits = {(each.project, each.name): each for each in list_sites(client, project)}
        devices = [each for each in list_devices(client, project) if each.state != "retired"]
    for each in devices:
        key = each.project, each.site
        none = SiteView(project=each.project, name=each.site, mib_per_s=None, window=None)
        limits.setdefault(key, none)
    rows = [
        {
            "name": each.name,
            "project": each.project,
            "devices": sum((one.project, one.site) == key for one in devices),
            "download": _say_limits(each)[0],
            "updates": _say_limits(each)[1],
            "price": _say_price(each),
        }
        for key, each in sorted(limits.items())
    ]
    names = ("name", "project", "devices", "download", "updates", "price")
    columns = [TableColumn(each) for each in names]
    rows_out(columns, rows, output, empty="no sites; `cavvy edge token --site NAME` makes one")


@command.command("logs")
@click.argument("name", metavar="DEVICE")
@project_option
def logs(name: str, project: str) -> None:
    """Print the newest lines of the log of a device's program, at most 500.

    The device sends them at its next check-in, usually within 72 seconds.
    """
    _ask(project, name, [])


@command.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("name", metavar="DEVICE")
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND..."
)
@project_option
def execute(name: str, arguments: tuple[str, ...], project: str) -> None:
    """Run a command on a device at its next check-in, and exit with the command's exit code.

    The device must have enrolled with a token of `cavvy edge token --site NAME --allow-exec`. The
    command gets no input, ends after a minute, and has the rights of the device's program. The last
    32 KiB of its output are printed. The audit log names the command.
    """
    _ask(project, name, list(arguments))


def _ask(project: str, name: str, command: list[str]) -> None:
    """Print what a device answers, and exit with the exit code."""
    import sys
    import time

    from cavvy.capabilities.edge.wire import ask_device, get_device, read_device_task

    with session() as client:
        state = get_device(client, project, name).state
        if state in ("offline", "silent"):
            note_out(f"device {name} is {state}")
        found = ask_device(client, project, name, command)
        click.echo(f"waiting for the next check-in of {name}", err=True)
        until = time.monotonic() + _PATIENCE_S
        while found.exit_code is None and time.monotonic() < until:
            found = read_device_task(client, project, name, found.id, wait_s=20)
    if found.exit_code is None:
        reason = "it has the command, but has not answered" if found.told else "it did not check in"
        raise CommandFailure(
            f"device {name} gave no answer within {_PATIENCE_S:.0f} s: {reason}",
            f"`cavvy edge show {name}` says when it was heard of",
        )
    # a device may be hostile: its text must not control the terminal
    click.echo("".join(_printable(each) for each in found.output), nl=False)
    sys.exit(found.exit_code)


def _read_price(text: str) -> int | None:
    """Return micro-dollars an hour, or None for `none` and ""."""
    from cavvy.domain.units import UnitError, parse_rate

    if text in ("", "none"):
        return None
    try:
        return parse_rate(text).micros_per_hour
    except UnitError as error:
        hint = "for example --device-usd-hour 0.012, or `none` to remove the price"
        raise CommandFailure(f"--device-usd-hour: {error}", hint, exit_code=2) from error


def _say_price(site: "SiteView") -> str:
    if site.device_micros_per_hour is None:
        return "price of a device unknown"
    usd = Decimal(site.device_micros_per_hour).scaleb(-6)
    return f"${usd.normalize():f} per hour and device"


def _read_window(window: str) -> tuple[int, int] | None:
    if window and _WINDOW.fullmatch(window) is None:
        raise CommandFailure(f"--window {window}: expected hours such as 1-5", exit_code=2)
    first, _, last = window.partition("-")
    return (int(first), int(last)) if window else None


def _say_limits(site: "SiteView") -> tuple[str, str]:
    """Return what its devices fetch together, and when they update."""
    rate = "no limit" if site.mib_per_s is None else f"{site.mib_per_s:g} MiB/s"
    return rate, "all hours" if site.window is None else f"{site.window[0]}-{site.window[1]} h"


def _printable(character: str) -> str:
    return (
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
    )


@command.command("retire")
@click.argument("name")
@project_option
def retire(name: str, project: str) -> None:
    """Refuse a lost or unused device from now on. It gets no more models and no more answers.

    The secrets that it may have are listed; replace them if it is lost.
    """
    from cavvy.capabilities.edge.wire import retire_device

    made = call_server(retire_device, project, name)
    click.echo(f"device {name} is retired")
    for secret in made.variables:
        click.echo(f"if it is lost, replace the secret {secret}: its engines had it as a variable")
    for secret, services in made.secrets.items():
        told = "service" if len(services) == 1 else "services"
        click.echo(
            f"if it is lost, replace the secret {secret}: make a new key of the {told} "
            f"{', '.join(services)}, and revoke the one that the device had"
        )


@command.command("rotate-keys")
@project_option
@json_option
def rotate_keys(project: str, output: str) -> None:
    """Replace the keys with which the server signs the project's models.

    Keys of `cavvy model key` stay. The new list of keys is signed with the former key too, so
    devices follow at their next update, also those that were offline during several rotations. A
    device that has followed refuses what the former keys sign; one that has not still accepts it.
    """
    from cavvy.capabilities.models.wire import rotate_signing_keys

    made = call_server(rotate_signing_keys, project)
    if output == "json":
        from cavvy.cli.view.output import json_out

        json_out(made)
        return
    click.echo(f"the models of project {project} have new keys (list {made.version})")
    note_out("a device follows when it next updates a model")


@command.command("deploy")
@click.argument("model", metavar="MODEL@NUMBER|LABEL")
@project_option
@click.option("--site", default="", help="Only the devices of this site.")
@_label_option
@click.option(
    "--waves",
    default="",
    metavar="SHARES",
    help="Shares of the devices, such as 1%,10%,100%. The default is one device, 1 %, 10 %, all.",
)
@click.option("--soak", default="10m", metavar="TIME", help="How long each wave lasts at least.")
@click.option("--mib-per-s", type=NumberRange(0.001, 1e6), help="Limit of each device's download.")
@click.option(
    "--collect-below",
    type=NumberRange(0, 1),
    metavar="PROBABILITY",
    help="Keep requests whose answers are less certain, for `cavvy edge collect`.",
)
@click.option("--window", default="", metavar="HOURS", help="Hours to update in, such as 1-5.")
@packages_options
@json_option
def deploy(
    model: str,
    project: str,
    site: str,
    labels: tuple[str, ...],
    waves: str,
    soak: str,
    mib_per_s: float | None,
    collect_below: float | None,
    window: str,
    packages: Path | None,
    targets: tuple[str, ...],
    output: str,
) -> None:
    """Bring a published model to devices, wave by wave.

    With a label of `cavvy model promote`, they get the version that has it now.

    Each device tries the new version beside the old one and goes back by itself if it fails. The
    rollout halts, and its devices go back, if the new version has more errors or is slower. Devices
    that refused a version try it again if it is deployed again.

    MODEL cavvy.edge is the devices' own program: they get the server's version of it. A device
    starts it, and returns to its former version unless the new one checks in with the server and
    serves the same models. With --packages, that version runs with these Python packages, such as a
    newer onnxruntime, before those that were installed when the device enrolled; later versions
    keep them until others are deployed. Only admins of the project may deploy packages, which run
    with all rights of the devices' program.
    """
    from msgspec import structs

    from cavvy.capabilities.edge.nouns import PROGRAM
    from cavvy.capabilities.edge.wire import RolloutAsk, deploy_model

    name, number = (model, "0") if model == PROGRAM else _read_version(model)
    if packages and model != PROGRAM:
        raise _misplaced_packages(PROGRAM)
    ask = RolloutAsk(
        model=name,
        to=int(number) if number.isdecimal() else 0,
        label="" if number.isdecimal() else number,
        site=site,
        labels=_read_labels(labels),
        waves=_read_waves(waves),
        soak_s=read_length(soak, "--soak").total_seconds(),
        mib_per_s=mib_per_s,
        window=_read_window(window),
        collect_below=collect_below,
        made_by=getpass.getuser(),
    )
    with session() as client:
        if packages:
            ask = structs.replace(ask, packages=_upload(client, project, packages, targets))
        made = deploy_model(client, project, ask)
    if output == "json":
        from cavvy.cli.view.output import json_out

        json_out(made)
        return
    _say_deployed(made, name)


def _misplaced_packages(program: str) -> CommandFailure:
    return CommandFailure(
        f"--packages is for {program}",
        "publish a model with its packages; `cavvy model publish --help` tells how",
        exit_code=2,
    )


def _say_deployed(made: "RolloutView", name: str) -> None:
    click.echo(f"rollout {made.name} brings {name}@{made.to} to {made.devices:,} devices")
    if made.left_out:
        told = ", ".join(made.left_out[:4]) + (", …" if len(made.left_out) > 4 else "")
        note_out(f"the model must stay in {made.residency}: not on {told}")
    click.echo("`cavvy edge rollouts` shows how far it is")


def _upload(client: "ApiClient", project: str, packages: Path, targets: tuple[str, ...]) -> str:
    """Upload the packages of the devices' program, and return the snapshot's hash."""
    from tempfile import TemporaryDirectory

    from cavvy.capabilities.models.version_files import upload_folder

    with TemporaryDirectory(prefix="cavvy-packages-") as folder:
        collect_wheels(client, project, packages, targets, Path(folder))
        return upload_folder(client, project, Path(folder))


def _read_version(model: str) -> tuple[str, str]:
    """Return the name of MODEL@NUMBER or MODEL@LABEL, and the number or label."""
    name, _, number = model.rpartition("@")
    if not name or not number:
        raise CommandFailure(
            f"{model}: expected MODEL@NUMBER or MODEL@LABEL, such as defects@7",
            "`cavvy model list` lists models",
            exit_code=2,
        )
    return name, number


@command.command("rollouts")
@any_project_option
@output_option
def rollouts(project: str | None, output: str) -> None:
    """List rollouts, newest first."""
    from cavvy.capabilities.edge.wire import list_rollouts

    found = call_server(list_rollouts, project)
    rows = [
        {
            "name": each.name,
            "model": f"{each.model}@{each.to}",
            "to": each.site or "all sites",
            "phase": each.phase,
            "wave": f"{each.wave + 1} of {len(each.waves)}",
            "devices": f"{each.serving:,} of {each.devices:,}",
            "refused": each.refused,
            "errors": _say_errors(each),
            "reason": each.reason,
        }
        for each in found
    ]
    columns = [
        TableColumn("name"),
        TableColumn("model"),
        TableColumn("to", drop=3),
        TableColumn("phase"),
        TableColumn("wave", drop=4),
        TableColumn("devices"),
        TableColumn("refused", drop=2),
        TableColumn("errors", drop=1),
        TableColumn("reason", wrap=True),
    ]
    rows_out(columns, rows, output, empty="no rollouts; see `cavvy edge deploy`")


@command.command("halt")
@click.argument("name")
@project_option
@click.option("--reason", default="", metavar="TEXT", help="Why.")
def halt(name: str, project: str, reason: str) -> None:
    """Take the version of a rollout back from its devices."""
    from cavvy.capabilities.edge.wire import halt_rollout

    call_server(halt_rollout, project, name, reason)
    click.echo(f"rollout {name} is halted; its devices return to their former version")


@command.command("collect")
@click.argument("model")
@project_option
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="The file to write.")
@click.option(
    "--residency", default="", help="Also take samples of devices with this label `residency`."
)
def collect(model: str, project: str, out: str, residency: str) -> None:
    """Write the requests of a model whose answers were uncertain as JSON lines, oldest first.

    Devices keep these requests if `cavvy edge deploy` had --collect-below. Each line has device,
    number, model, version, at, certainty, request and answer. The file is replaced at the end.
    """
    import json

    from cavvy.capabilities.edge.wire import list_samples
    from cavvy.cli.view.new_file import new_file
    from cavvy.cli.view.output_file import check_output
    from cavvy.client.model_wire import list_models

    check_output(Path(out))
    count, left_out, after = 0, 0, ""
    with session() as client:
        try:
            with new_file(out) as file:
                while True:
                    page = list_samples(client, project, model, residency=residency, after=after)
                    for each in page.samples:
                        line = {"device": each.device, **json.loads(each.body)}
                        file.write(json.dumps(line).encode() + b"\n")
                    count += len(page.samples)
                    left_out, after = left_out + page.left_out, page.after
                    if not after:
                        break
        except OSError as error:
            told = f"{out} cannot be written: {error.strerror}"
            raise CommandFailure(told, "name another file with --out", exit_code=2) from error
        if not count + left_out and model not in {
            each.model for each in list_models(client, project)
        }:
            note_out(f"project {project} has published no model {model}")
    click.echo(f"{count:,} samples of {model} are in {out}")
    if left_out:
        told = f"note: {left_out:,} samples must stay where they are: add --residency"
        click.echo(told, err=True)


def _read_labels(labels: tuple[str, ...]) -> dict[str, str]:
    if wrong := next((each for each in labels if "=" not in each), None):
        raise CommandFailure(f"--label {wrong}: expected NAME=VALUE", exit_code=2)
    return dict(each.split("=", 1) for each in labels)


def _read_waves(text: str) -> list[float]:
    try:
        return [float(each.strip().removesuffix("%")) / 100 for each in text.split(",") if text]
    except ValueError as error:
        raise CommandFailure(
            f"--waves {text}: expected growing shares such as 1%,10%,100%", exit_code=2
        ) from error


def _say_models(device: "DeviceView") -> str:
    return ", ".join(f"{each.name}@{each.serving}" for each in device.models if each.serving)


def _say_errors(rollout: "RolloutView") -> str:
    old, new = rollout.errors
    return f"{old:.2%} → {new:.2%}" if rollout.requests else ""
