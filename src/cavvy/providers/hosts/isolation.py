"""Defines how the jobs of different projects share a machine."""

from collections.abc import Mapping
from enum import StrEnum

from cavvy.agent.work.hide import ALONE, HIDES
from cavvy.agent.work.obstacle import METADATA, METADATA_ADDRESSES, NAMESPACES, NONE, ROOT
from cavvy.domain.tasks import Scalar
from cavvy.providers.base import Refused

# an obstacle that the server itself finds
MIXED = "a job that was started without separation still runs on this machine"


class HostIsolation(StrEnum):
    """A value of the setting `isolation`."""

    ONE_PROJECT = ""  # all jobs that run at the same time belong to one project
    NAMESPACES = "namespaces"
    NONE = "none"


def read_isolation(provider: str, settings: Mapping[str, Scalar]) -> HostIsolation:
    """Read the setting. Raises Refused if the value is unknown."""
    value = str(settings.get("isolation", ""))
    if value not in list(HostIsolation):
        names = " or ".join(f"`{each}`" for each in HostIsolation if each)
        raise Refused(f"[providers.{provider}] isolation: expected {names}, not {value!r}")
    return HostIsolation(value)


def say_isolation(mode: HostIsolation, obstacle: str | None) -> str:
    """Explain to users how the jobs of different projects share a machine. `obstacle` is the reason
    why the machine cannot separate jobs (`say_obstacle`), or None if the machine was not queried
    yet.
    """
    if mode is HostIsolation.NONE:
        return "jobs run side by side on the machine, without separation"
    if mode is HostIsolation.ONE_PROJECT:
        return "the machine runs jobs of one project at a time"
    if obstacle is None:
        return (
            "the machine runs jobs of one project at a time, until it has shown that it can "
            "separate jobs"
        )
    if obstacle:
        return f"the machine runs jobs of one project at a time, because {obstacle}"
    return "side by side, separated by namespaces"


def say_protection(ability: str) -> str:
    """Explain to users whether jobs without an image can change what the machine, its user and
    Cavvy obey. `ability` is the result of `agent.work.hide.find_ability` on the machine.
    """
    what = "settings, programs, units, cron, start files or the kernel's settings"
    if ability == ALONE:
        return f"jobs cannot change {what}, nor signal other processes"
    if ability == HIDES:
        return f"jobs cannot change {what}, but can signal processes of the same user"
    return (
        f"jobs without an image can change {what} as far as the machine's user can, and can signal "
        "processes: user namespaces are not available or turned off"
    )


def say_obstacle(code: str) -> str:
    """Explain to users why a machine cannot separate jobs. `code` is the result of
    `agent.work.obstacle` on the machine; an unknown code counts as an obstacle. The result is "" if
    nothing prevents the separation.
    """
    if code == NONE:
        return ""
    kind, _, address = code.partition(" ")
    if kind == METADATA and address in METADATA_ADDRESSES:
        return (
            f"a metadata service answers at {address}, and jobs could request this machine's "
            "credentials there; block this address for the user who runs the jobs, as "
            "docs/guides/isolation.md shows"
        )
    if code == ROOT:
        return (
            "namespaces need a user other than root, but jobs on this machine would run as root; "
            "use another user"
        )
    if code == NAMESPACES:
        return "namespaces need a Linux kernel that lets unprivileged users create them"
    return "the machine did not report whether it can separate jobs"
