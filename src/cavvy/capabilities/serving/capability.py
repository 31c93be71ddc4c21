"""What services contribute."""

from cavvy.frame.capability import (
    FIRST_ONE,
    Capability,
    Command,
    ConsoleAction,
    ConsolePage,
    OwnTables,
)

_HERE = "cavvy.capabilities.serving"
CAPABILITY = Capability(
    name="serving",
    summary="Answer requests with a program on replicas.",
    commands=(
        Command(
            name="serve",
            place=f"{_HERE}.serve_command:command",
            summary="Start a service, or deploy a new revision of it.",
            section="Serve requests",
            after=FIRST_ONE,
            first_after="dev stop",
        ),
        Command(
            name="deploy",
            place=f"{_HERE}.deploy_command:command",
            summary="Serve the model that a job has trained, or deploy functions.",
            section="Serve requests",
            after="serve",
        ),
        Command(
            name="services",
            place=f"{_HERE}.services_command:command",
            summary="List services with their replicas and traffic, or show one.",
            section="Serve requests",
            after="deploy",
        ),
        Command(
            name="call",
            place=f"{_HERE}.call_command:command",
            summary="Send a request to a service.",
            section="Serve requests",
            after="services",
        ),
        Command(
            name="key",
            place=f"{_HERE}.services_command:key_command",
            summary="Create, list and revoke keys for calls to a service.",
            section="Serve requests",
            after="chat call",
            called="services key",
        ),
        Command(
            name="queue",
            place=f"{_HERE}.call_command:queue_command",
            summary="List, show, retry and delete queued calls to a service.",
            section="Serve requests",
            after="key",
            called="services queue",
        ),
        Command(
            name="unserve",
            place=f"{_HERE}.serve_command:unserve_command",
            summary="Stop a service after its pending requests are answered.",
            section="Serve requests",
            after="queue",
            called="stop",
            ends=True,
        ),
    ),
    service_commands=f"{_HERE}.command_parts:CommandParts",
    docs=("guides/serve.md", "guides/service-access.md", "guides/service-calls.md"),
    routes=(
        f"{_HERE}.routes.calls:hook_router",
        f"{_HERE}.routes.calls:router",
        f"{_HERE}.routes.keys:router",
        f"{_HERE}.routes.figures:router",
    ),
    errors=_HERE,
    answers=f"{_HERE}.gateway",
    settings=_HERE,
    pages=(
        ConsolePage("/services", f"{_HERE}.pages:make", "Services", after="/jobs"),
        ConsolePage("/services/{project}/{name}", f"{_HERE}.pages:make_one"),
        ConsolePage("/services/{project}/{name}/try", f"{_HERE}.pages:make_trial"),
    ),
    actions=(
        ConsoleAction("/services", f"{_HERE}.pages:act"),
        ConsoleAction("/services/{project}/{name}/end", f"{_HERE}.pages:end"),
        ConsoleAction("/services/{project}/{name}/try", f"{_HERE}.pages:send_trial"),
        ConsoleAction("/services/{project}/{name}/retry", f"{_HERE}.pages:retry"),
        ConsoleAction("/services/{project}/{name}/calls/{call}/retry", f"{_HERE}.pages:retry_one"),
    ),
    tables=OwnTables(
        _HERE,
        of_attempts=("divided_bills",),
        snapshots=("services",),
        named=(("service", "services"),),
        rows=f"{_HERE}.service_rows:SqlServices",
    ),
    reconcilers=(f"{_HERE}.keeper:Serving",),
)
