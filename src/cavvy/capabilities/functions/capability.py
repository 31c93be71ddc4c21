"""What functions contribute."""

from cavvy.frame.capability import Capability, Export, OwnTables

_APP = "cavvy.capabilities.functions.app"
_ERRORS = "cavvy.capabilities.functions.errors"
CAPABILITY = Capability(
    name="functions",
    summary="Run Python functions on any node: `cavvy.App`, `@app.function`, `@app.cls`.",
    docs=("concepts/functions.md",),
    routes=("cavvy.capabilities.functions.routes:router",),
    errors="cavvy.capabilities.functions",
    tables=OwnTables(
        "cavvy.capabilities.functions",
        of_projects=("function_jobs",),
        snapshots=("function_jobs",),
    ),
    exports=(
        Export("App", f"{_APP}:App"),
        Export("Function", f"{_APP}:Function"),
        Export("FunctionCall", "cavvy.capabilities.functions.calls:FunctionCall"),
        Export("Image", "cavvy.capabilities.functions.image:FunctionImage"),
        Export("enter", f"{_APP}:enter"),
        Export("exit", f"{_APP}:exit"),
        Export("method", f"{_APP}:method"),
        Export("AppBroken", f"{_ERRORS}:AppBroken"),
        Export("CallCancelled", f"{_ERRORS}:CallCancelled"),
        Export("CallDeadlock", f"{_ERRORS}:CallDeadlock"),
        Export("CallFailed", f"{_ERRORS}:CallFailed"),
        Export("CallTimeout", f"{_ERRORS}:CallTimeout"),
        Export("NotSendable", f"{_ERRORS}:NotSendable"),
        Export("WorkerLost", f"{_ERRORS}:WorkerLost"),
    ),
    programs=("cavvy.capabilities.functions.program:find_program",),
)
