"""What sandboxes contribute."""

from cavvy.frame.capability import (
    Capability,
    Command,
    ConsoleAction,
    ConsolePage,
    Export,
    OwnTables,
)

_HERE = "cavvy.capabilities.sandboxes"
_SANDBOX = f"{_HERE}.sandbox"
_TOOLS = "cavvy.capabilities.sandboxes.tools"
_ERRORS = "cavvy.capabilities.sandboxes.errors"
CAPABILITY = Capability(
    name="sandboxes",
    summary="Run untrusted code in sandboxes: `cavvy.Sandbox`.",
    commands=(
        Command(
            name="sandbox",
            place="cavvy.capabilities.sandboxes.command:command",
            summary="Run untrusted code in sandboxes: create, exec, list and rm.",
            section="Work on nodes",
        ),
    ),
    routes=(f"{_HERE}.routes:router", f"{_HERE}.routes:agent_router"),
    own_tokens=("/agent/v1/asks/sandboxes",),
    tables=OwnTables(_HERE, of_projects=("sandboxes",)),
    pages=(ConsolePage("/sandboxes", f"{_HERE}.pages:make", "Sandboxes", after="/jobs"),),
    actions=(ConsoleAction("/sandboxes", f"{_HERE}.pages:act"),),
    docs=("concepts/sandboxes.md", "tutorials/sandboxes.md"),
    needs=("functions",),
    uses=("mcp",),
    tools=tuple(f"{_TOOLS}:{name}" for name in ("sandbox_create", "sandbox_run", "sandboxes")),
    exports=(
        Export("Sandbox", f"{_SANDBOX}:Sandbox"),
        Export("SandboxSnapshot", f"{_SANDBOX}:SandboxSnapshot"),
        Export("IsolationMissing", f"{_ERRORS}:IsolationMissing"),
        Export("SandboxEnded", f"{_ERRORS}:SandboxEnded"),
        Export("SandboxError", f"{_ERRORS}:SandboxError"),
        Export("SandboxFileError", f"{_ERRORS}:SandboxFileError"),
        Export("SandboxLost", f"{_ERRORS}:SandboxLost"),
        Export("SandboxNotFound", f"{_ERRORS}:SandboxNotFound"),
    ),
)
