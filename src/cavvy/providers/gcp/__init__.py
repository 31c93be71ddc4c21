"""Google Compute Engine: each node is one virtual machine that starts the agent on boot."""

from datetime import timedelta

from cavvy.providers.abilities import TELLS_QUOTAS
from cavvy.providers.base import Feature, Manifest, ProviderSetting, SettingKind, explain_results
from cavvy.providers.notices import NoticeHold, NoticeSource
from cavvy.providers.settings import disk_setting, project_flag, project_text, regions_setting, text
from cavvy.providers.vm.abilities import ABILITIES

# the settings that all providers on Google Cloud share
KEY_FILE = ProviderSetting(
    name="key_file",
    kind=SettingKind.KEY_FILE,
    consequence="The JSON file with the key of a service account. By default, Google's "
    "library searches for Application Default Credentials: the file in "
    "`$GOOGLE_APPLICATION_CREDENTIALS`, the login of `gcloud auth application-default "
    "login`, then the service account of the machine on which the server runs.",
).for_projects()
ZONES = project_text("zones", "The zones to use, separated by commas. The default is all zones.")
# of endpoints and notebooks of Vertex AI
MACHINES = project_text(
    "machines",
    "Patterns of the machine types to offer, separated by commas, such as `g2-*, "
    "n1-*-t4x1`. The default is every type of the provider `vertex` that has a price in "
    "the catalog.",
    "*",
)


def project(owned: str) -> ProviderSetting:
    """Return the setting for the project of what a provider rents, such as "machines"."""
    default = "The default is the project of the credentials."
    return project_text("project", f"The project of the {owned}. {default}").for_setup()


_METADATA = "http://169.254.169.254/computeMetadata/v1/instance"
_FLAVOR = {"Metadata-Flavor": "Google"}
# The server answers a request that has the ETag of the last answer only when the value changes:
# https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange
_HOLD = NoticeHold(
    query="wait_for_change=true&timeout_sec=60&last_etag={tag}",
    first_tag="0",
    longest=timedelta(seconds=60),
)
# Google announces a preemption 30 seconds before the machine is powered off, and maintenance of a
# machine with GPUs 60 minutes before:
# https://cloud.google.com/compute/docs/instances/spot#preemption-process
# https://cloud.google.com/compute/docs/gpus/gpu-host-maintenance
NOTICES = (
    NoticeSource(
        source="Compute Engine",
        url=f"{_METADATA}/preempted",
        headers=_FLAVOR,
        hold=_HOLD,
        match={"": ("TRUE",)},
        within=timedelta(seconds=30),
    ),
    NoticeSource(
        source="Compute Engine's host maintenance",
        url=f"{_METADATA}/maintenance-event",
        headers=_FLAVOR,
        hold=_HOLD,
        match={"": ("TERMINATE_ON_HOST_MAINTENANCE",)},
        within=timedelta(minutes=60),
    ),
)

MANIFEST = Manifest(
    name="gcp",
    title="Google Compute Engine",
    cloud="cavvy.providers.gcp.cloud:GcpCloud",
    layer="cavvy.providers.vm.provider:make_provider",
    prices="cavvy.providers.gcp.price_list",
    abilities=(*ABILITIES, TELLS_QUOTAS),
    visibility_delay=timedelta(minutes=1),
    rights="the role Compute Instance Admin (v1), or the permissions in docs/guides/gcp.md",
    notices=NOTICES,
    notice=timedelta(seconds=30),
    unsupported={
        Feature.CAPACITY: "Compute Engine does not report free capacity, and its forecast for "
        "spot machines is not used yet "
        "(https://docs.cloud.google.com/compute/docs/instances/view-vm-availability); if a zone "
        "has no capacity, Cavvy tries the next best offer "
        "(https://cloud.google.com/compute/docs/troubleshooting/"
        "troubleshooting-resource-availability)",
        Feature.VOLUMES: "disks cannot be attached yet; copy data from and to a bucket instead "
        "(https://cloud.google.com/compute/docs/disks)",
        Feature.NETWORK: "tasks cannot select a network; the setting `network` selects one. "
        "GPUDirect-TCPX and TCPXO need programs on the machine that Cavvy does not install "
        "(https://cloud.google.com/compute/docs/gpus/gpudirect)",
        Feature.RESULTS: explain_results(
            "a machine's disk is deleted when the machine ends "
            "(https://cloud.google.com/compute/docs/instances/deleting-instance)",
            "the machine",
        ),
    },
    options={
        "image": "the machine image, as projects/PROJECT/global/images/[family/]NAME",
        "reservation": "the only reservation that machines may use, as NAME or "
        "projects/PROJECT/reservations/NAME",
    },
    docs="docs/guides/gcp.md",
    project_key="cavvy.providers.gcp.credentials",
    settings=(
        project("machines"),
        KEY_FILE,
        regions_setting("regions"),
        ZONES,
        project_text(
            "machines",
            "Patterns of the machine types to offer, separated by commas. The default is the "
            "types with GPUs (A2, A3, A4, G2, G4), N1 with attached GPUs, TPU v5p and v6e, E2 "
            "standard and N2 standard. Patterns also match the catalog's names, such as "
            "n1-standard-8-t4x1.",
            "a2-*, a3-*, a4-*, a4x-*, g2-*, g4-*, n1-*-t4x*, n1-*-v100x*, tpu-*, e2-standard-*, "
            "n2-standard-*",
        ),
        project_text(
            "image",
            "The image of machines, as projects/PROJECT/global/images/[family/]NAME. The default "
            "is an image with drivers for the GPU or, for machines without GPUs, Ubuntu 24.04.",
        ),
        disk_setting(
            "The size of a machine's boot disk, unless the task requests another size.",
            100,
            minimum=50,
        ),
        project_text(
            "disk_type",
            "The type of the boot disk, unless the task names a type. The default is "
            "`hyperdisk-balanced` for machines that accept no other type, and `pd-balanced` "
            "for all others.",
        ),
        project_text("network", "The VPC network of machines.", "default"),
        project_text(
            "subnetwork",
            "The subnetwork of machines, by its name in each region. Networks with custom "
            "subnets require this setting.",
        ),
        project_flag(
            "gpu_networks",
            "If `true`, the nodes of a gang of A3 machines with eight GPUs, A4 or A4X get all "
            "network interfaces of their GPUs, in networks that Cavvy creates once and keeps. If "
            "`false`, they have one interface, and the account needs no right to create networks.",
            default=True,
        ),
        project_flag(
            "external_address",
            "If `true`, machines get an external address. If `false`, the machines need Cloud NAT "
            "or another route to the server.",
            default=True,
        ),
        project_text(
            "service_account",
            "The e-mail address of the service account with which jobs use services of Google "
            "Cloud, such as Cloud Storage, without keys. By default, machines have no service "
            "account.",
        ),
        text(
            "endpoint",
            "The address of the Compute Engine API.",
            "https://compute.googleapis.com/compute/v1",
        ),
        text(
            "prices_endpoint",
            "The address of Google's list of prices, or of a mirror. If the credentials have no "
            "permission to read this list, Cavvy uses the catalog's prices for machines, and "
            "does not count the costs of disks and addresses.",
            "https://cloudbilling.googleapis.com",
        ),
    ),
)
