"""Google Cloud TPU: each slice is one node of the Cloud TPU API, and each of its hosts starts the
agent on boot.
"""

from cavvy.providers.abilities import TELLS_QUOTAS
from cavvy.providers.base import Feature
from cavvy.providers.gcp import KEY_FILE, ZONES, project
from cavvy.providers.settings import project_flag, project_text, regions_setting, text
from cavvy.providers.vm.abilities import make_manifest

_DOCS = "https://cloud.google.com/tpu/docs"

MANIFEST = make_manifest(
    "tpu",
    "Google Cloud TPU",
    machine="a slice",
    deletion=f"{_DOCS}/managing-tpus-tpu-vm",
    rights="the roles TPU Admin (roles/tpu.admin) and Cloud Quotas Viewer "
    "(roles/cloudquotas.viewer), or the permissions in docs/guides/tpu.md",
    endpoint="https://tpu.googleapis.com/v2",
    unsupported={
        Feature.CAPACITY: "the API lists the types of slices of a zone, but not how many "
        "slices are free; if a zone has no free slice, Cavvy tries the next best offer "
        f"({_DOCS}/regions-zones)",
        Feature.REPAIR: "the hosts of a slice are created and deleted together "
        f"({_DOCS}/system-architecture-tpu-vm)",
        Feature.SELF_END: "a slice whose hosts have shut themselves down still exists and is "
        f"billed; the server deletes these slices ({_DOCS}/managing-tpus-tpu-vm)",
        Feature.VOLUMES: f"{_DOCS}/attach-durable-block-storage",
        Feature.DISK: "the boot disk of a host has a fixed size of 100 GiB and a fixed type "
        f"({_DOCS}/attach-durable-block-storage)",
        Feature.NETWORK: "hosts have one network interface; the chips of a slice have a network of "
        f"their own ({_DOCS}/system-architecture-tpu-vm)",
        Feature.NOTICE: f"Google documents no notice on the hosts of a spot slice ({_DOCS}/spot)",
    },
    settings=(
        project("slices"),
        KEY_FILE,
        regions_setting("regions"),
        ZONES,
        project_text(
            "runtime",
            "The software version of hosts, such as `v2-alpha-tpuv6e`. The default is Google's "
            "runtime for JAX and PyTorch on the TPU's generation.",
        ),
        project_text("network", "The VPC network of hosts.", "default"),
        project_text(
            "subnetwork", "The subnetwork of hosts. Networks with custom subnets need this setting."
        ),
        project_flag(
            "external_address",
            "If `true`, hosts get external addresses. If `false`, the hosts need Cloud NAT or "
            "another route to the server.",
            default=True,
        ),
        project_text(
            "service_account",
            "The e-mail address of a service account. The processes of jobs on the hosts can use "
            "this account without keys. By default, Google gives hosts the default account of "
            "Compute Engine.",
        ),
        text(
            "quotas_endpoint",
            "The address of the Cloud Quotas API.",
            "https://cloudquotas.googleapis.com/v1",
        ),
    ),
    cloud="cavvy.providers.tpu.cloud:TpuCloud",
    layer="cavvy.providers.vm.provider:make_provider",
    zoned=True,
    more_abilities=(TELLS_QUOTAS,),
    project_key="cavvy.providers.gcp.credentials",
    options={"runtime": "the software version of this task's hosts; see the setting `runtime`"},
)
