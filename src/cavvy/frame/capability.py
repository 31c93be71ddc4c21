"""What a capability contributes to Cavvy, as a value. The core reads these values, and names no
capability.

A capability is a folder of `cavvy.capabilities`, or a package of someone else that declares the
entry point `NAME = "PACKAGE.capability"` in the group `cavvy.capabilities`. Its module `capability`
defines `CAPABILITY: Capability`. `cavvy --help` imports these modules, so they import nothing but
this one: what they contribute is named as text (`MODULE:NAME`), and imported when it is used.
"""

from typing import NamedTuple

FIRST_ONE = "^"


class Command(NamedTuple):
    """A command of the CLI."""

    # the word after `cavvy`; or a group of the core and the word after it, such as "simulate edge",
    # which the help of the group lists
    name: str
    place: str  # the click command, as MODULE:NAME
    summary: str  # a sentence for `cavvy --commands`
    section: str = ""  # the title of the section of `cavvy --help` in which it stands
    # the command of the section after which it stands, or several names, of which the first that is
    # there counts; "": the last, FIRST_ONE: the first
    after: str = ""
    # how it is called if it belongs to another command, such as "catalog diagram"; `cavvy NAME` is
    # answered, too, but not listed
    called: str = ""
    # for what first users need: the command of the first section after which it stands there
    first_after: str = ""
    ends: bool = False  # whether it ends or removes what users may still need


class Mode(NamedTuple):
    """Another way to run a command of the core on a task."""

    command: str  # a command of the core that has modes: plan
    place: str  # a `cli.task.modes.CommandMode`, as MODULE:NAME


class ConsolePage(NamedTuple):
    """A page of the web console."""

    path: str  # such as "/today"; parts of it in braces are parameters
    place: str  # the function that makes the page, as MODULE:NAME
    menu: str = ""  # the word in the menu; "": none
    # the page after which it stands in the menu, by its path; "": the last
    after: str = ""
    # whether it compares the jobs that the parameters `project` and `job`, repeated, name
    compares: bool = False


class ConsoleAction(NamedTuple):
    """A change that a form of the web console requests."""

    path: str  # such as "/today/{name}/remove"
    # the function that makes the change, as MODULE:NAME. It returns the page to show, or its path
    place: str


class TaskFiles(NamedTuple):
    """Task files of other tools that a capability reads."""

    place: str  # what reads them (`task_files.foreign.TaskReader`), as MODULE:NAME
    tools: tuple[str, ...]  # the names of the tools, which `--as` takes in lower case


class Export(NamedTuple):
    """A name of the Python interface: `cavvy.NAME`."""

    name: str
    place: str  # what it names, as MODULE:NAME


class ConsoleData(NamedTuple):
    """What the script of a page asks the web console for, or what the page shows."""

    path: str  # such as "/jobs/{project}/{name}/curves"
    # the function that makes it, as MODULE:NAME; it returns JSON as bytes, or an answer
    # (`starlette.responses.Response`), such as a picture
    place: str


class OwnTables(NamedTuple):
    """The tables of a capability. They stay in the database while it is left out."""

    package: str  # in its folder `migrations` lie the migrations: 0001_NAME.sql and so on
    # those whose rows show that a project is in use; each has a column `project`
    of_projects: tuple[str, ...] = ()
    # those whose rows belong to an attempt (column `attempt_id`), and are removed with its job
    of_attempts: tuple[str, ...] = ()
    of_jobs: tuple[str, ...] = ()  # those whose rows belong to a job (column `job_id`), likewise
    snapshots: tuple[str, ...] = ()  # those whose column `snapshot` names files to keep
    # those whose rows have a name among those of jobs (columns `project` and `name`), and keep the
    # project busy: the word for a row, such as "service", and the table
    named: tuple[tuple[str, str], ...] = ()
    rows: str = ""  # the class that answers what the core asks of them (`store.own_tables.OwnRows`)
    sealed: tuple[str, ...] = ()  # those with values that the key of secrets encrypts
    # the class that lists these values and encrypts them again (`store.rotation.SealedValues`)
    reseal: str = ""


class Capability(NamedTuple):
    """A capability."""

    name: str  # the name of its folder
    summary: str  # a sentence: what users can do with it
    commands: tuple[Command, ...] = ()
    modes: tuple[Mode, ...] = ()
    templates: str = ""  # the package in whose folders templates of `cavvy init` lie
    docs: tuple[str, ...] = ()  # its pages, as paths below `docs`
    needs: tuple[str, ...] = ()  # the capabilities on which it stands
    # those that a part of it uses; without one, this part says what is missing, and the rest works
    uses: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()  # its groups of routes (`api.routing.RouteGroup`)
    # path prefixes of its routes that check tokens themselves, such as those of devices: nodes and
    # devices reach them, too
    own_tokens: tuple[str, ...] = ()
    open_paths: tuple[str, ...] = ()  # those of them that need no token
    errors: str = ""  # the package with its error codes, `errors.csv`
    answers: str = ""  # the package with the codes that its own HTTP server answers, `answers.csv`
    settings: str = ""  # the package with its settings, `settings.csv`
    tables: OwnTables | None = None
    # functions that make a reconciler (`control.parts.OwnReconciler`) from `control.parts`
    reconcilers: tuple[str, ...] = ()
    # functions that learn in the transaction that stores it what happens (`store.announcements`)
    listeners: tuple[str, ...] = ()
    events: tuple[str, ...] = ()  # the names of what it announces, of which people can be notified
    pages: tuple[ConsolePage, ...] = ()
    actions: tuple[ConsoleAction, ...] = ()
    data: tuple[ConsoleData, ...] = ()  # what scripts of its pages ask for
    static: str = ""  # the package whose folder `static` the console serves at /static/NAME
    # functions that make a part of a page in the console (`console.pages.page.PagePart`): of a
    # job's page, above its other figures, and of the page of an array or a group of jobs
    job_parts: tuple[str, ...] = ()
    group_parts: tuple[str, ...] = ()
    task_files: tuple[TaskFiles, ...] = ()  # the files of other tools that it reads
    # what it adds to the Python interface. Of a name that the core has, too, that of the capability
    # counts
    exports: tuple[Export, ...] = ()
    # functions that recognise Python files which `cavvy run` does not submit as scripts:
    # `find(text)` returns what runs and deploys the file (`cli.task.programs.Program`), or None
    programs: tuple[str, ...] = ()
    # functions that call something by its name with arguments of JSON, and print the result, for
    # `cavvy call NAME FUNCTION --json`: `call(project, name, function, text, key)`
    callers: tuple[str, ...] = ()
    # functions that say what the models which the installation itself publishes consist of:
    # `list_files(model)` returns the SHA-256 of files by path, or None for other models
    own_models: tuple[str, ...] = ()
    # the class of what commands of jobs ask of services, since task files describe services, too
    # (`cli.reach.services.ServiceCommands`)
    service_commands: str = ""
    # the class of the gateway's paths that belong to no single service
    # (`capabilities.serving.gateway.door.SharedPaths`)
    gateway_paths: str = ""
    # the classes of the gateway's meters, which read from answers what requests used, and of what
    # chooses their replicas (those of `capabilities.serving.gateway.extensions`)
    gateway_meters: str = ""
    gateway_scorer: str = ""
    tools: tuple[str, ...] = ()  # functions that coding agents may call: they read, or cost nothing
