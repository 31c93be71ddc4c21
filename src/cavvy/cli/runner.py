"""`cavvy runner`: runs the jobs of GitHub Actions and GitLab CI as jobs of Cavvy."""

import click

from cavvy.cli.runners import github, gitlab
from cavvy.cli.view.groups import CommandGroup


@click.group("runner", cls=CommandGroup)
def command() -> None:
    """Run the jobs of GitHub Actions and GitLab CI on any provider. Each CI job gets a runner of
    its own, which is a job of Cavvy and ends with the CI job.
    """


for each in (github.serve, gitlab.command):
    command.add_command(each)
