"""What choosing places contributes."""

from cavvy.frame.capability import Capability, Command

CAPABILITY = Capability(
    name="choose",
    summary="Compare accelerators, renting with owning, and places, with every assumption.",
    commands=(
        Command(
            name="compare",
            place="cavvy.capabilities.choose.compare:command",
            summary="Compare accelerators across providers by price, performance and measured "
            "runs.",
            section="Describe and plan",
            after="bench plan",
        ),
        Command(
            name="tco",
            place="cavvy.capabilities.choose.tco:command",
            summary="Compare renting with owning machines over years, with every assumption.",
            section="Describe and plan",
            after="compare",
        ),
        Command(
            name="decide",
            place="cavvy.capabilities.choose.decide:command",
            summary="Decide between clouds, own machines, edge and serverless, with reasons.",
            section="Describe and plan",
            after="tco",
        ),
        Command(
            name="diagram",
            place="cavvy.capabilities.choose.diagram:command",
            summary="Draw the catalog, the providers and how Cavvy decides, as SVG.",
            section="Describe and plan",
            after="decide",
            called="catalog diagram",
        ),
    ),
    docs=("reference/choosing.md",),
    uses=("simulation",),
)
