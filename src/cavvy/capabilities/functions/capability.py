"""What functions contribute."""

from cavvy.frame.capability import (
    Capability,
    Command,
    ConsoleAction,
    ConsolePage,
    Export,
    OwnTables,
)

_APP = "cavvy.capabilities.functions.app"
_STATE = "cavvy.capabilities.functions.state"
_COUNTS = "cavvy.capabilities.functions.counts"
_PAGES = "cavvy.capabilities.functions.pages"
_ERRORS = "cavvy.capabilities.functions.errors"
CAPABILITY = Capability(
    name="functions",
    summary="Run Python functions on any node: `cavvy.App`, `@app.function`, `@app.cls`.",
    commands=(
        Command(
            name="apps",
            place="cavvy.capabilities.functions.apps_command:command",
            summary="List, show, stop and remove deployed apps, and see their calls and logs.",
            section="Serve requests",
            after="edge model unserve services deploy",
        ),
        Command(
            name="state",
            place=f"{_STATE}.command:command",
            summary="List and remove the dicts, queues and volumes of a project.",
            section="Serve requests",
            after="apps edge model unserve services deploy",
        ),
        Command(
            name="import",
            place="cavvy.capabilities.functions.import_command:command",
            summary="Rewrite a Python script that uses modal for Cavvy.",
            section="Describe and plan",
            after="convert diagram bench plan",
        ),
    ),
    callers=("cavvy.capabilities.functions.apps_command:call_function",),
    docs=("concepts/functions.md",),
    routes=(
        "cavvy.capabilities.functions.routes:router",
        f"{_STATE}.routes:router",
        f"{_STATE}.routes:agent_router",
        f"{_COUNTS}.routes:router",
        f"{_COUNTS}.routes:agent_router",
    ),
    own_tokens=("/agent/v1/asks/state", "/agent/v1/asks/apps"),
    errors="cavvy.capabilities.functions",
    tables=OwnTables(
        "cavvy.capabilities.functions",
        of_projects=("function_jobs", "function_calls", "state_objects"),
        snapshots=("function_jobs",),
    ),
    reconcilers=("cavvy.capabilities.functions.dispatcher:FunctionCalls",),
    pages=(
        ConsolePage("/apps", f"{_PAGES}:make", "Apps", after="/jobs"),
        ConsolePage("/apps/{project}/{name}", f"{_PAGES}:make_one"),
        ConsolePage("/apps/{project}/{name}/calls/{call}", f"{_PAGES}:make_call"),
    ),
    actions=(ConsoleAction("/apps/{project}/{name}/calls/{call}/cancel", f"{_PAGES}:cancel"),),
    exports=(
        Export("App", f"{_APP}:App"),
        Export("Dict", f"{_STATE}.objects:Dict"),
        Export("Function", f"{_APP}:Function"),
        Export("FunctionCall", "cavvy.capabilities.functions.calls:FunctionCall"),
        Export("Queue", f"{_STATE}.objects:Queue"),
        Export("Limit", "cavvy.capabilities.functions.limits:CallLimit"),
        Export("Image", "cavvy.capabilities.functions.image:FunctionImage"),
        Export("Secret", "cavvy.capabilities.functions.storage:FunctionSecret"),
        Export("Volume", "cavvy.capabilities.functions.storage:FunctionVolume"),
        Export("WebError", "cavvy.capabilities.functions.web:WebError"),
        Export("WebRequest", "cavvy.capabilities.functions.web:WebRequest"),
        Export("current_call_key", f"{_APP}:current_call_key"),
        Export("enter", f"{_APP}:enter"),
        Export("exit", f"{_APP}:exit"),
        Export("method", f"{_APP}:method"),
        Export("parameter", f"{_APP}:parameter"),
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
