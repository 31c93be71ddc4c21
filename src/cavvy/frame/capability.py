"""What a capability contributes to Cavvy, as a value. The core reads these values, and names no
capability.

A capability is a folder of `cavvy.capabilities`, or a package of someone else that declares the
entry point `NAME = "PACKAGE.capability"` in the group `cavvy.capabilities`. Its module `capability`
defines `CAPABILITY: Capability`. `cavvy --help` imports these modules, so they import nothing but
this one: what they contribute is named as text (`MODULE:NAME`), and imported when it is used.
"""

from typing import NamedTuple


class Command(NamedTuple):
    """A command of the CLI."""

    name: str  # the word after `cavvy`
    place: str  # the click command, as MODULE:NAME
    summary: str  # a sentence for `cavvy --commands`
    section: str  # the title of the section of `cavvy --help` in which it stands
    after: str = ""  # the command of the section after which it stands; "": the last
    # how it is called if it belongs to another command, such as "catalog diagram"; `cavvy NAME` is
    # answered, too, but not listed
    called: str = ""


class Capability(NamedTuple):
    """A capability."""

    name: str  # the name of its folder
    summary: str  # a sentence: what users can do with it
    commands: tuple[Command, ...] = ()
    pages: tuple[str, ...] = ()  # its pages, as paths below `docs`
    needs: tuple[str, ...] = ()  # the capabilities on which it stands
