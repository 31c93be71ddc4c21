"""What published models contribute."""

from cavvy.frame.capability import Capability, Command, OwnTables

_HERE = "cavvy.capabilities.models"
CAPABILITY = Capability(
    name="models",
    summary="Publish models in numbered, signed versions.",
    commands=(
        Command(
            name="model",
            place=f"{_HERE}.command:command",
            summary="Publish models in numbered, signed versions.",
            section="Serve requests",
            after="unserve",
        ),
    ),
    routes=(f"{_HERE}.routes:router",),
    errors=_HERE,
    tables=OwnTables(_HERE, of_projects=("models",), snapshots=("models",)),
    reconcilers=(f"{_HERE}.keeper:ModelKeeper",),
)
