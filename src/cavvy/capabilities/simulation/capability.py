"""What simulations contribute."""

from cavvy.frame.capability import Capability, Command, Mode

_HERE = "cavvy.capabilities.simulation"
CAPABILITY = Capability(
    name="simulation",
    summary="Run the policies over recorded spot markets, queues and requests.",
    commands=(
        Command(
            name="simulate",
            place=f"{_HERE}.command:command",
            summary="Run the policies over recorded spot markets and queues.",
            section="Describe and plan",
            after="diagram bench plan",
        ),
    ),
    uses=("serving",),
    modes=(Mode("plan", f"{_HERE}.load:LOAD"),),
    docs=("guides/simulate.md",),
)
