"""`cavvy doctor`: examines this machine, or the environment of a running job on its node."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_jobs
from cavvy.cli.reach.session import project_option, session
from cavvy.cli.reach.tunnel import read_target
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output import TableColumn, json_option, json_out, rows_out, text_out
from cavvy.domain.values import Struct, replace

if TYPE_CHECKING:
    from cavvy.client import ApiClient

_LIMIT_S = 180
_MOST_BYTES = 1 << 20  # of a node's answer
_SKEW_S = 5.0  # of a node's clock; signatures of requests to clouds fail after minutes
_ORDER = ("lack", "ok", "note")
_MASTER_PORT = 29500  # at which the ranks of a gang meet (`WorkConfig.master_port`)
# The Python that a job gets, which runs the program in "$1".
_LINE = (
    'p=$(command -v python3 || command -v python) || exit 127; program=$1; shift; exec "$p" -c '
    '"$program" "$@"'
)


class MachineFinding(Struct, frozen=True, kw_only=True):
    """What was found about one thing. `fix` is what mends a lack, or ""."""

    name: str
    state: str  # one of `_ORDER`
    found: str
    fix: str = ""


class _Answer(Struct, frozen=True, kw_only=True):
    now: float  # seconds since 1970
    findings: Sequence[MachineFinding]


@click.command("doctor")
@click.argument("name", required=False, shell_complete=complete_jobs)
@project_option
@json_option
def command(name: str | None, project: str, output: str) -> None:
    """Show what GPU jobs lack on this machine, each with the command that mends it.

    With NAME or NAME:RANK, the command examines the environment of this running job on its node.
    NAME may also be a node of `cavvy nodes hosts`, which is examined through a job on it. The exit
    code is 1 if something is lacking. The command changes nothing.
    """
    answer = _examine_here() if name is None else _examine_node(project, name)
    found = sorted(answer, key=lambda each: _ORDER.index(each.state))
    lacking = [each for each in found if each.state == "lack"]
    if output == "json":
        rows = [
            {"name": each.name, "state": each.state, "found": each.found, "fix": each.fix}
            for each in found
        ]
        json_out({"place": name or "this machine", "lacks": len(lacking), "findings": rows})
    else:
        text_out(f"In the environment of {name}, where the commands below must run:" * bool(name))
        columns = [TableColumn("state"), TableColumn("what"), TableColumn("found", wrap=True)]
        rows_out(columns, [(each.state, each.name, each.found) for each in found])
        for each in lacking:
            click.echo()
            text_out(_printable(f"{each.name}: {each.found}"))
            click.echo(_printable(f"  {each.fix}"))
    if lacking:
        raise SystemExit(1)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _program() -> str:
    import pkgutil

    source = pkgutil.get_data("cavvy.agent", "doctor.py")
    assert source is not None
    return source.decode()


def _examine_here() -> Sequence[MachineFinding]:
    words = ["sh", "-c", _LINE, "sh", _program(), *map(str, _list_ports())]
    shown = sys.stderr.isatty()  # a container engine can take 20 seconds to answer
    click.echo("examining this machine …" * shown, err=True, nl=False)
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailure(f"no answer in {_LIMIT_S} s", "run `nvidia-smi`") from error
    finally:
        click.echo("\r\x1b[K" * shown, err=True, nl=False)
    return _read_answer(done.stdout, done.returncode, done.stderr.decode(errors="replace")).findings


def _list_ports() -> list[int]:
    """Return the ports that jobs and, if it is not running, this machine's server need."""
    from cavvy.cli.reach.providers import load_settings
    from cavvy.client import ApiError, connect

    ports = [_MASTER_PORT]
    try:
        with connect(start=False, timeout_s=2.0):
            return ports
    except (ApiError, OSError):
        settings = load_settings()
    for name in settings.values:
        with suppress(ValueError):
            if name.endswith("listen"):
                ports.append(int(settings.text(name).rpartition(":")[2]))
    return [port for port in ports if 0 < port < 1 << 16]


def _examine_node(project: str, name: str) -> Sequence[MachineFinding]:
    job, rank = read_target(name)
    with session() as client:
        job, rank, project = _find_job(client, project, job, rank)
        data, code, began = bytearray(), 0, datetime.now(UTC).timestamp()
        words = ["sh", "-c", _LINE, "sh", _program()]
        with closing(client.exec(project, job, words, rank=rank)) as chunks:
            for chunk in chunks:
                data += chunk.data
                code = code if chunk.exit_code is None else chunk.exit_code
                if len(data) > _MOST_BYTES:
                    raise CommandFailure(f"{name} answers more than {_MOST_BYTES >> 20} MiB")
        ended = datetime.now(UTC).timestamp()
    answer = _read_answer(bytes(data), code, "")
    skew_s = max(began - answer.now, answer.now - ended, 0.0)
    return [_judge_clock(each, skew_s) for each in answer.findings]


def _find_job(client: "ApiClient", project: str, name: str, rank: int) -> tuple[str, int, str]:
    """Return the job of this name, or a job on the own host of this name, with its rank and
    project. Raises CommandFailure.
    """
    from cavvy.cli.reach.names import find_running
    from cavvy.client import ApiError
    from cavvy.client.maintenance_wire import list_hosts

    if "/" not in name:  # names of own hosts have a slash
        try:
            return find_running(client, project, name), rank, project
        except ApiError as error:
            if error.code != "job-not-found":
                raise
    for host in list_hosts(client):
        for holder in host.holders if host.name == name else ():
            if holder.job_id and holder.phase == "running":
                return holder.job_id, holder.rank, holder.project
    raise CommandFailure(
        f"there is no job {name}, and no node of this name with a running job of yours",
        "`cavvy nodes hosts` lists own nodes; a node is examined through a job",
    )


def _judge_clock(finding: MachineFinding, skew_s: float) -> MachineFinding:
    """Return the finding about a node's clock, which differs from this machine's by at least
    `skew_s`.
    """
    if finding.name != "clock" or skew_s <= _SKEW_S:
        return finding
    text = f"at least {skew_s:.0f} s away from this machine's clock"
    return replace(finding, state="lack", found=text, fix="sudo timedatectl set-ntp true")


def _read_answer(data: bytes, code: int, errors: str) -> _Answer:
    """Parse the program's output, which a node may have changed. Raises CommandFailure."""
    import msgspec

    from cavvy.agent.doctor import MARK

    text = data.decode(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    if not lines and code == 127:
        lack = MachineFinding(
            name="python",
            state="lack",
            found="no python3 in PATH",
            fix="sudo apt-get install -y python3",
        )
        return _Answer(now=datetime.now(UTC).timestamp(), findings=[lack])
    try:
        answer = msgspec.json.decode(lines[-1].removeprefix(MARK), type=_Answer)
    except (IndexError, msgspec.MsgspecError, RecursionError) as error:
        told = (text + errors).strip().splitlines()[-1:] or [f"exit code {code}"]
        raise CommandFailure(
            f"the examination failed: {told[0][:200]}", "a Python of version 3.8 or newer runs it"
        ) from error
    if any(each.state not in _ORDER for each in answer.findings):
        raise CommandFailure("the examination gave an unknown state")
    return answer
