"""`cavvy cp`: copies files and folders to and from a job's node."""

import click

from cavvy.cli.reach.arguments import complete_copies
from cavvy.cli.reach.session import project_option


@click.command("cp")
@click.argument("source", metavar="SOURCE", shell_complete=complete_copies)
@click.argument("target", metavar="TARGET", shell_complete=complete_copies)
@project_option
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def command(source: str, target: str, project: str, quiet: bool) -> None:
    """Copy a file or folder to or from a job's node. The path on the node is NAME[:RANK]:PATH.

    cavvy cp digits:out/weights.pt . · cavvy cp data/ digits:1:/tmp/data

    A relative path on a node starts in the job's folder. Files from a node are written only below
    TARGET: names outside TARGET are refused, links that lead out of the folder are skipped, a .git
    that exists here is not changed, and setuid bits are dropped. A file gets its final name when it
    is complete; an interrupted copy resumes if the part that was copied is unchanged.
    """
    from cavvy.cli.reach.copying import copy

    copy(source, target, project, quiet)
