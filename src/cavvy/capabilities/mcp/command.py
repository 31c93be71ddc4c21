"""`cavvy mcp`: the MCP server with which coding agents plan, run and read jobs."""

from pathlib import Path

import click

from cavvy.cli.reach.session import project_option
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import amount_option


@click.command("mcp")
@amount_option(
    "--max-usd",
    default=0.0,
    show_default=True,
    help="The most that jobs and services of coding agents may cost in a month.",
)
@project_option
@click.option("--skill", is_flag=True, help="Print the skill file for coding agents, and exit.")
@click.option(
    "--install-skill",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the skill file into this folder of skills, such as .claude/skills, and exit.",
)
def command(max_usd: float, project: str, skill: bool, install_skill: Path | None) -> None:
    """Let coding agents plan, run and read jobs: an MCP server on standard input and output.

    Coding agents start this command by themselves; `claude mcp add cavvy -- cavvy mcp --max-usd 20`
    registers it. The tools have your rights in one project. Tools that spend money ask you first,
    if the agent's program can show questions, and otherwise through the agent. The server enforces
    --max-usd with a budget of the user for the tag mcp=USER, which all that the tools start has.
    Without --max-usd, only work that costs nothing is started.
    """
    if skill:
        click.echo(_read_skill(), nl=False)
        return
    if install_skill is not None:
        _install(install_skill)
        return
    _serve(max_usd, project)


def _read_skill() -> str:
    import pkgutil

    text = pkgutil.get_data("cavvy.capabilities.mcp", "SKILL.md")
    assert text is not None
    return text.decode()


def _install(folder: Path) -> None:
    from cavvy.cli.view.output_file import make_folder, write_text

    path = folder / "cavvy" / "SKILL.md"
    make_folder(path.parent)
    write_text(path, _read_skill())
    click.echo(f"the skill is in {path}")


def _serve(max_usd: float, project: str) -> None:
    import os

    from cavvy.domain.units import UnitError, parse_usd
    from cavvy.packages import extra_command

    try:
        limit = parse_usd(max_usd)
    except UnitError as error:
        raise CommandFailure(f"--max-usd: {error}", "an example: `--max-usd 20`", 2) from error
    try:
        from cavvy.capabilities.mcp.server import make_server
    except ModuleNotFoundError as error:
        if error.name not in ("mcp", "mcp_types"):
            raise
        hint = f"install it: {extra_command('mcp')}"
        raise CommandFailure("the package mcp is not installed", hint) from error
    from cavvy.capabilities.mcp.spending import Spending

    os.environ["CAVVY_PROJECT"] = project
    make_server(Spending(limit)).run("stdio")
