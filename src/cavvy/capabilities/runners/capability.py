"""What the runners for CI contribute."""

from cavvy.frame.capability import Capability, Command

CAPABILITY = Capability(
    name="runners",
    summary="Run the jobs of GitHub Actions and GitLab CI on any provider.",
    commands=(
        Command(
            name="runner",
            place="cavvy.capabilities.runners.command:command",
            summary="Run the jobs of GitHub Actions and GitLab CI on any provider.",
            section="Share a server",
            after="pool",
        ),
    ),
    docs=("reference/ci-runners.md",),
)
