"""`cavvy runner`: runs the jobs of GitHub Actions and GitLab CI as jobs of Cavvy."""

import click

from cavvy.capabilities.runners.github import serve
from cavvy.capabilities.runners.gitlab import command as gitlab_command
from cavvy.cli.view.groups import CommandGroup


@click.group("runner", cls=CommandGroup)
def command() -> None:
    """Run the jobs of GitHub Actions and GitLab CI on any provider. Each CI job gets a runner of
    its own, which is a job of Cavvy and ends with the CI job.
    """


for each in (serve, gitlab_command):
    command.add_command(each)
