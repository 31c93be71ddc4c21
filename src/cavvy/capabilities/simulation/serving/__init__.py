"""Replays recorded requests against a simulated service, and compares the production autoscaler
with the rules of other systems.
"""

from cavvy.cli.view.failure import CommandFailure
from cavvy.frame.discover import find_capabilities


def need_serving(command: str) -> None:
    """Raise CommandFailure if the capability is missing whose gateway and autoscaler answer the
    recorded requests.
    """
    if all(each.name != "serving" for each in find_capabilities().capabilities):
        raise CommandFailure(
            f"{command} needs the capability serving, which is not installed",
            "`cavvy --commands` names what is left out, with the reason",
            exit_code=2,
        )
