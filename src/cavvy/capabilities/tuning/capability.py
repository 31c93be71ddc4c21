"""What the tuning of training scripts contributes."""

from cavvy.frame.capability import Capability, Command

_COMMAND = "cavvy.capabilities.tuning.command"
CAPABILITY = Capability(
    name="tuning",
    summary="Show what costs a training script time and money, and try changes.",
    commands=(
        Command(
            name="profile",
            place=f"{_COMMAND}:command",
            summary="Show where a training script's time and money go, and what to fix.",
            section="Describe and plan",
            after="diagram bench plan",
        ),
        Command(
            name="tune",
            place=f"{_COMMAND}:tune_command",
            summary="Try changes to a training script's plan, and keep the changes that help.",
            section="Describe and plan",
            after="profile",
        ),
    ),
    docs=("guides/profile-and-tune.md",),
    needs=("estimates",),
)
