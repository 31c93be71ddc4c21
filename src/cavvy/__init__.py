"""Cavvy: one control plane for every GPU a team can rent or own.

Notebooks and scripts import the Python interface from this module: `from cavvy import Client,
Task`. To keep the import fast, each name is loaded from `cavvy.sdk` when it is first used.
"""

TYPE_CHECKING = False  # set without importing `typing`, because every command imports this module
if TYPE_CHECKING:
    # at run time, capabilities say what they add (`exports`); editors and type checkers read this
    from cavvy.capabilities.functions.app import App as App
    from cavvy.capabilities.functions.app import Function as Function
    from cavvy.capabilities.functions.app import current_call_key as current_call_key
    from cavvy.capabilities.functions.app import enter as enter
    from cavvy.capabilities.functions.app import exit as exit
    from cavvy.capabilities.functions.app import method as method
    from cavvy.capabilities.functions.app import parameter as parameter
    from cavvy.capabilities.functions.calls import FunctionCall as FunctionCall
    from cavvy.capabilities.functions.errors import AppBroken as AppBroken
    from cavvy.capabilities.functions.errors import CallCancelled as CallCancelled
    from cavvy.capabilities.functions.errors import CallDeadlock as CallDeadlock
    from cavvy.capabilities.functions.errors import CallFailed as CallFailed
    from cavvy.capabilities.functions.errors import CallTimeout as CallTimeout
    from cavvy.capabilities.functions.errors import NotSendable as NotSendable
    from cavvy.capabilities.functions.errors import WorkerLost as WorkerLost
    from cavvy.capabilities.functions.image import FunctionImage as Image
    from cavvy.capabilities.functions.limits import CallLimit as Limit  # noqa: F401
    from cavvy.capabilities.functions.state.objects import Dict as Dict
    from cavvy.capabilities.functions.state.objects import Queue as Queue
    from cavvy.capabilities.functions.storage import FunctionSecret as Secret  # noqa: F401
    from cavvy.capabilities.functions.storage import FunctionVolume as Volume  # noqa: F401
    from cavvy.capabilities.functions.web import WebError as WebError
    from cavvy.capabilities.functions.web import WebRequest as WebRequest
    from cavvy.capabilities.sandboxes.errors import IsolationMissing as IsolationMissing
    from cavvy.capabilities.sandboxes.errors import SandboxEnded as SandboxEnded
    from cavvy.capabilities.sandboxes.errors import SandboxError as SandboxError
    from cavvy.capabilities.sandboxes.errors import SandboxFileError as SandboxFileError
    from cavvy.capabilities.sandboxes.errors import SandboxLost as SandboxLost
    from cavvy.capabilities.sandboxes.errors import SandboxNotFound as SandboxNotFound
    from cavvy.capabilities.sandboxes.sandbox import Sandbox as Sandbox
    from cavvy.capabilities.sandboxes.sandbox import SandboxSnapshot as SandboxSnapshot
    from cavvy.sdk.array import ArrayResult, JobArray, RowProgress
    from cavvy.sdk.async_client import AsyncClient, AsyncJob, AsyncJobArray
    from cavvy.sdk.client import Client
    from cavvy.sdk.curves import log
    from cavvy.sdk.errors import (
        CavvyError,
        ConsentNeeded,
        InvalidArgument,
        InvalidTask,
        JobFailed,
        JobNotFound,
        NoOffer,
        ServerUnavailable,
        WaitTimeout,
    )
    from cavvy.sdk.examples import Audio, Histogram, Picture, Table, Text
    from cavvy.sdk.job import Job
    from cavvy.sdk.operation import (
        HostHolder,
        HostReservation,
        OwnHost,
        PolicyStatus,
        ShareLoan,
        ShareStatus,
        UserLimits,
    )
    from cavvy.sdk.status import (
        CostItem,
        FigureSeries,
        JobCost,
        JobEvent,
        JobStatus,
        NodeStatus,
    )
    from cavvy.sdk.task import Task
    from cavvy.spec.keys import (
        Accelerator,
        Checkpoint,
        Disk,
        GitWorkdir,
        Input,
        Limits,
        Network,
        NodeTest,
        Output,
        Param,
        ResourceChoice,
        Resources,
        Retry,
        RowBatch,
        Schedule,
        Setup,
        VolumeMount,
        Webhook,
        Work,
    )

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "ArrayResult",
    "AsyncClient",
    "AsyncJob",
    "AsyncJobArray",
    "Audio",
    "CavvyError",
    "Checkpoint",
    "Client",
    "ConsentNeeded",
    "CostItem",
    "Disk",
    "FigureSeries",
    "GitWorkdir",
    "Histogram",
    "HostHolder",
    "HostReservation",
    "Image",
    "Input",
    "InvalidArgument",
    "InvalidTask",
    "Job",
    "JobArray",
    "JobCost",
    "JobEvent",
    "JobFailed",
    "JobNotFound",
    "JobStatus",
    "Limits",
    "Network",
    "NoOffer",
    "NodeStatus",
    "NodeTest",
    "Output",
    "OwnHost",
    "Param",
    "Picture",
    "PolicyStatus",
    "ResourceChoice",
    "Resources",
    "Retry",
    "RowBatch",
    "RowProgress",
    "Schedule",
    "ServerUnavailable",
    "Setup",
    "ShareLoan",
    "ShareStatus",
    "Table",
    "Task",
    "Text",
    "UserLimits",
    "VolumeMount",
    "WaitTimeout",
    "Webhook",
    "Work",
    "__version__",
    "log",
]

# The module that contains each name which is not a key of a task.
_MODULES = {
    "ArrayResult": "array",
    "AsyncClient": "async_client",
    "AsyncJob": "async_client",
    "AsyncJobArray": "async_client",
    "Client": "client",
    **dict.fromkeys(
        (
            "CavvyError",
            "ConsentNeeded",
            "InvalidArgument",
            "InvalidTask",
            "JobFailed",
            "JobNotFound",
            "NoOffer",
            "ServerUnavailable",
            "WaitTimeout",
        ),
        "errors",
    ),
    "Job": "job",
    "log": "curves",
    **dict.fromkeys(("Audio", "Histogram", "Picture", "Table", "Text"), "examples"),
    **dict.fromkeys(("JobArray", "RowProgress"), "array"),
    **dict.fromkeys(
        ("CostItem", "FigureSeries", "JobCost", "JobEvent", "JobStatus", "NodeStatus"), "status"
    ),
    **dict.fromkeys(
        (
            "HostHolder",
            "HostReservation",
            "OwnHost",
            "PolicyStatus",
            "ShareLoan",
            "ShareStatus",
            "UserLimits",
        ),
        "operation",
    ),
    "Task": "task",
}


if not TYPE_CHECKING:  # a type checker would accept every name of a module with `__getattr__`

    def __getattr__(name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(f"module 'cavvy' has no attribute {name!r}")
        from importlib import import_module

        if place := _list_exports().get(name):
            from cavvy.frame.discover import load

            globals()[name] = found = load(place)
            return found
        if name not in __all__:
            raise AttributeError(f"module 'cavvy' has no attribute {name!r}")
        module = f"sdk.{_MODULES[name]}" if name in _MODULES else "spec.keys"
        found = getattr(import_module(f"cavvy.{module}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_list_exports()} - {"TYPE_CHECKING"})

    def _list_exports() -> dict[str, str]:
        """Return what capabilities add, as MODULE:NAME by its name."""
        from cavvy.frame.discover import find_capabilities

        found = find_capabilities().capabilities
        return {each.name: each.place for one in found for each in one.exports}
