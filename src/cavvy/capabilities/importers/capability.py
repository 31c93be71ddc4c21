"""What reading files of other tools contributes."""

from cavvy.frame.capability import Capability, Command, OwnTables, TaskFiles

CAPABILITY = Capability(
    name="importers",
    summary="Run files of other tools, scripts and notebooks, and write them as Cavvy's files.",
    commands=(
        Command(
            name="convert",
            place="cavvy.capabilities.importers.convert:command",
            summary="Write a file of another tool as Cavvy's task file.",
            section="Describe and plan",
            after="diagram bench plan",
        ),
    ),
    task_files=(
        TaskFiles(
            place="cavvy.capabilities.importers.reader:READER",
            tools=("SkyPilot", "dstack", "Kubernetes", "Slurm", "PBS", "Compose"),
        ),
    ),
    # sbatch within a job asks here, through its agent
    routes=("cavvy.capabilities.importers.slurm.submission:router",),
    own_tokens=("/agent/v1/asks/slurm",),
    tables=OwnTables("cavvy.capabilities.importers"),
    settings="cavvy.capabilities.importers",
    docs=(
        "guides/from-slurm.md",
        "guides/from-pbs.md",
        "guides/from-skypilot-and-dstack.md",
        "guides/from-kubernetes.md",
        "guides/from-compose.md",
        "guides/from-notebooks.md",
        "reference/other-tools.md",
    ),
)
