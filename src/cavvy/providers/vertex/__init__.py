"""Google's Vertex AI: each gang is one custom job, whose containers start the agent."""

from datetime import timedelta

from cavvy.providers.base import Feature
from cavvy.providers.gcp import KEY_FILE, project
from cavvy.providers.managed.manifest import JobManifest, list_unsupported_by_jobs
from cavvy.providers.settings import disk_setting, project_number, project_text, text

_DOCS = "https://cloud.google.com/vertex-ai/docs"
_JOB = f"{_DOCS}/reference/rest/v1/CustomJobSpec"
_COMPUTE = f"{_DOCS}/training/configure-compute"
_TRAINING = f"{_DOCS}/training/understanding-training-service"

MANIFEST = JobManifest(
    name="vertex",
    title="Google Vertex AI",
    cloud="cavvy.providers.vertex.jobs:VertexService",
    # SIGKILL follows SIGTERM after 25 seconds; the agent needs 10 of them for its last report
    notice=timedelta(seconds=15),
    rights="aiplatform.customJobs.create, get, list and cancel (the role Vertex AI User, "
    "roles/aiplatform.user, contains them), and iam.serviceAccounts.actAs for the account of the "
    "setting `service_account`, if it is set",
    unsupported={
        **list_unsupported_by_jobs("a custom job", page=_JOB, disk=_TRAINING),
        Feature.LOGIN: "Vertex AI pulls images from Artifact Registry with the rights of its "
        "service agent, and pulls only public images from Docker Hub "
        f"({_DOCS}/training/create-custom-container)",
        Feature.CAPACITY: "Vertex AI does not report free capacity; a job without capacity fails, "
        "and Cavvy tries the next best offer "
        f"({_TRAINING}#common-errors)",
        Feature.VOLUMES: "a custom job attaches no existing disks; copy data from and to a bucket "
        f"instead ({_JOB})",
        Feature.MOUNTS: "a custom job is a container without access to folders of its host; its "
        f"NFS mounts are not supported yet ({_JOB})",
        Feature.NETWORK: "Vertex AI neither reports nor selects the speed of the network "
        f"({_COMPUTE})",
        Feature.DISK: "`resources.disk` selects the size of the disk; its type cannot be selected "
        f"yet ({_COMPUTE})",
    },
    options={
        "image": "the image for this task; see the setting `image`",
        "reservation": "as the setting `reservation`",
    },
    docs="docs/guides/vertex.md",
    project_key="cavvy.providers.gcp.credentials",
    settings=(
        project("jobs"),
        KEY_FILE,
        project_text(
            "regions", "The regions to use, separated by commas.", "us-central1"
        ).for_setup(),
        project_text(
            "machines",
            "Patterns of the machine types to offer, separated by commas, such as `a2-*, "
            "n1-*-t4x1`. The default is every type that custom jobs can use and that has a price "
            "in the catalog.",
            "*",
        ),
        project_text(
            "image",
            "The image, in Artifact Registry or Docker Hub, of jobs whose task names no image. "
            "`{region}` is replaced by the job's region. Without this setting, each task must name "
            "an image.",
        ),
        project_text(
            "service_account",
            "The e-mail address of the service account that jobs run as. The work in the job runs "
            "with the account's permissions. The default is Vertex AI's own service agent for "
            "custom code.",
        ),
        project_text(
            "network",
            "The VPC network to which jobs are peered, as projects/NUMBER/global/networks/NAME. "
            "By default, jobs run in Google's own network, which reaches the internet.",
        ),
        project_text(
            "reservation",
            "The reservation that jobs use, as projects/PROJECT/zones/ZONE/reservations/NAME, or "
            "`any` for every reservation with the same machines. The default is none. Spot jobs "
            "use no reservation.",
        ),
        disk_setting(
            "The size of a machine's disk, unless the task requests another size.", 100, minimum=100
        ),
        project_number(
            "max_run_s",
            "Vertex AI stops a job after this time if its task has no limit.",
            default=604_800,
            minimum=60,
            unit="seconds",
            whole=True,
        ),
        text(
            "endpoint",
            "The address of the API. `{region}` is replaced by the job's region.",
            "https://{region}-aiplatform.googleapis.com/v1",
        ),
    ),
)
