"""Instances of Vertex AI Workbench: each session is a managed notebook, which starts the agent."""

from cavvy.providers.base import Feature
from cavvy.providers.gcp.settings import KEY_FILE, MACHINES, project
from cavvy.providers.managed.manifest import NotebookManifest, list_unsupported_by_notebooks
from cavvy.providers.settings import project_number, project_text, text

PRICING = "https://cloud.google.com/vertex-ai/pricing#notebooks"
_DOCS = "https://cloud.google.com/vertex-ai/docs/workbench"
_API = f"{_DOCS}/reference/rest/v2/projects.locations.instances"

MANIFEST = NotebookManifest(
    name="vertex-workbench",
    title="Vertex AI Workbench",
    cloud="cavvy.providers.vertex.workbench:WorkbenchInstances",
    rights="notebooks.instances.create, get, list and delete, and notebooks.operations.get (the "
    "role Notebooks Admin, roles/notebooks.admin, contains them), and iam.serviceAccounts.actAs "
    "for the account of the notebooks",
    unsupported={
        **list_unsupported_by_notebooks(
            "Google",
            "a Workbench instance",
            images=f"{_DOCS}/instances/introduction",
            api=_API,
            deletion=_API,
        ),
        Feature.VOLUMES: "a Workbench instance gets only new disks, no existing ones; copy data "
        f"from and to a bucket instead ({_API})",
        Feature.MOUNTS: "Cavvy mounts no folders on a Workbench instance; copy data from and to a "
        f"bucket instead ({_API})",
        Feature.NETWORK: f"Google neither reports nor selects the speed of the network ({_API})",
        Feature.DISK: "`resources.disk` selects the size of the disk; its type cannot be selected "
        f"yet ({_API})",
    },
    project_key="cavvy.providers.gcp.credentials",
    settings=(
        project("notebooks"),
        KEY_FILE,
        project_text(
            "zones",
            "The zones to use, separated by commas, such as `us-central1-a, us-central1-b`. "
            "Required.",
        ),
        project_text(
            "script",
            "The address in Cloud Storage of the script that starts Cavvy's script, such as "
            "`gs://my-bucket/cavvy.sh`; docs/guides/notebooks.md shows its three lines. The "
            "account of the "
            "notebooks needs the right to read the script. Required.",
        ),
        project_text(
            "fees",
            "Google's management fees in US dollars an hour, for each vCPU and for each GPU of a "
            f"type, such as `vCPU=0.01, T4=0.02`, from {PRICING}. Machines whose GPU has no "
            "fee here are not offered. This setting is required, because Google publishes these "
            "prices only on a web page. If a fee is 0, plans and bills do not contain it.",
        ),
        MACHINES,
        project_text(
            "service_account",
            "The e-mail address of the service account of the notebooks. The work in a session "
            "runs with the account's permissions. The default is the default account of Compute "
            "Engine.",
        ),
        project_text(
            "owner",
            "The e-mail address of the person who may open the notebooks' own Jupyter. By default, "
            "each person who may act as the service account may open Jupyter.",
        ),
        project_text(
            "network",
            "The network of notebooks, as projects/PROJECT/global/networks/NAME. The default is "
            "the project's network `default`.",
        ),
        project_text(
            "subnet",
            "The subnet of notebooks, as projects/PROJECT/regions/REGION/subnetworks/NAME. By "
            "default, Google selects the subnet of the zone's region.",
        ),
        project_number(
            "disk_gib",
            "The size of a notebook's data disk, which contains the session's files, unless the "
            "task requests another size. Google bills this disk, and a boot disk of 150 GB, in "
            "addition to the instance.",
            default=100,
            minimum=10,
            unit="GiB",
            whole=True,
        ),
        project_number(
            "idle_stop_s",
            "Google stops a notebook whose own Jupyter has run no kernel for this time. Google "
            "does not see sessions that Cavvy opens; `--keep` ends idle sessions sooner.",
            default=259_200,
            minimum=600,
            unit="seconds",
            whole=True,
        ),
        text(
            "endpoint",
            "The address of the Notebooks API.",
            "https://notebooks.googleapis.com/v2",
        ),
    ),
)
