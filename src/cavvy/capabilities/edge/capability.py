"""What devices at the edge contribute."""

from cavvy.frame.capability import Capability, Command, ConsoleAction, ConsolePage, OwnTables

_HERE = "cavvy.capabilities.edge"
CAPABILITY = Capability(
    name="edge",
    summary="Serve models on devices that are often offline.",
    commands=(
        Command(
            name="edge",
            place=f"{_HERE}.command:command",
            summary="Serve models on devices that are often offline.",
            section="Serve requests",
            after="model",
        ),
        Command(
            name="simulate edge",
            place=f"{_HERE}.simulate_command:command",
            summary="Roll a model out to simulated devices.",
        ),
    ),
    needs=("models",),
    own_models=(f"{_HERE}.device_program:list_files",),
    docs=("guides/devices.md", "concepts/edge.md", "concepts/edge-trust.md"),
    routes=(f"{_HERE}.routes:router",),
    own_tokens=("/edge/v1/",),
    open_paths=("/edge/v1/nonce", "/edge/v1/token"),
    errors=_HERE,
    tables=OwnTables(_HERE, of_projects=("edge_devices",)),
    reconcilers=(f"{_HERE}.keeper:EdgeKeeper",),
    pages=(
        ConsolePage("/devices", f"{_HERE}.pages:make", "Devices", after="/machines"),
        ConsolePage("/devices/{project}/{name}", f"{_HERE}.pages:make_one"),
    ),
    actions=(
        ConsoleAction("/devices", f"{_HERE}.pages:act"),
        ConsoleAction("/devices/{project}/rollouts/{name}/halt", f"{_HERE}.pages:halt"),
        ConsoleAction("/models/{project}/{name}/promote", f"{_HERE}.pages:promote"),
        ConsoleAction("/models/{project}/{name}/labels/{label}/remove", f"{_HERE}.pages:unlabel"),
    ),
)
