"""What estimates of training runs contribute."""

from cavvy.frame.capability import Capability, Command

_HERE = "cavvy.capabilities.estimates"
CAPABILITY = Capability(
    name="estimates",
    summary="Estimate and measure how fast a training script is on each accelerator.",
    commands=(
        Command(
            name="estimate",
            place=f"{_HERE}.command:command",
            summary="Estimate memory, step time and cost of a training run on every accelerator.",
            section="Describe and plan",
            after="plan",
        ),
        Command(
            name="bench",
            place=f"{_HERE}.bench:command",
            summary="Run your own script for a minute on chosen accelerators and save its speed.",
            section="Describe and plan",
            after="estimate",
        ),
    ),
    docs=("guides/estimate.md",),
)
