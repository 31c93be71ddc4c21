"""What this package contributes. `cavvy --help` imports this module, so it imports nothing else."""

from cavvy.frame.capability import Capability, Command

CAPABILITY = Capability(
    name="today",
    summary="Show what ran today.",
    commands=(
        Command(
            name="today",
            place="cavvy_today.command:command",
            summary="List the jobs that were submitted today.",
            section="Run and watch",
            after="ps",
        ),
    ),
)
