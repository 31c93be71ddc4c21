"""Oracle Cloud Infrastructure: each node is one compute instance that starts the agent on boot."""

from cavvy.providers.abilities import TELLS_QUOTAS
from cavvy.providers.base import Feature, ProviderSetting, SettingKind
from cavvy.providers.settings import disk_setting, project_flag, project_text, text
from cavvy.providers.vm.abilities import make_manifest, reach_setting

_DOCS = "https://docs.oracle.com/en-us/iaas/Content/Compute"

MANIFEST = make_manifest(
    "oci",
    "Oracle Cloud Infrastructure",
    machine="an instance",
    deletion=f"{_DOCS}/Tasks/terminatinginstance.htm",
    rights="a policy with the statements in docs/guides/oci.md, for one compartment",
    endpoint="https://{service}.{region}.oraclecloud.com/20160918",
    unsupported={
        Feature.CAPACITY: "OCI lists the shapes of an availability domain, but not how many "
        "machines are free; if a domain has no free machine, Cavvy tries the next best offer "
        f"({_DOCS}/References/computeshapes.htm)",
        Feature.SELF_END: "OCI bills an instance that has shut itself down "
        f"({_DOCS}/Tasks/restartinginstance.htm); the server terminates instances that have shut "
        "themselves down",
        Feature.VOLUMES: f"{_DOCS}/Tasks/instances-volumes.htm",
        Feature.NETWORK: "tasks cannot select a network; the setting `subnet` selects one "
        f"({_DOCS}/References/computeshapes.htm)",
        Feature.NOTICE: "OCI announces a preemption through its Events service only, and not on "
        f"the instance ({_DOCS}/Concepts/preemptible.htm)",
    },
    settings=(
        ProviderSetting(
            name="key_file",
            kind=SettingKind.KEY_FILE,
            consequence="The configuration file of OCI's own tools, which names the user, the "
            "tenancy, the region and the file of the private key, or contains the key as "
            "`key_content`. The default is the file in "
            "`$OCI_CONFIG_FILE`, then `~/.oci/config`.",
        ).for_projects(),
        text("profile", "The profile in the configuration file.", "DEFAULT"),
        project_text(
            "compartment",
            "The OCID of the compartment of instances. The default is the tenancy, which is the "
            "root compartment.",
        ).for_setup(),
        project_text(
            "regions",
            "The regions to use, separated by commas. The tenancy must be subscribed to these "
            "regions. The default is the region of the profile.",
        ).for_setup(),
        project_text(
            "subnet",
            "The subnet of instances: its OCID, or its name in each region. The default is the "
            "only subnet of the compartment.",
        ),
        project_text(
            "network_compartment",
            "The OCID of the compartment of the subnet. The default is the compartment in which "
            "Cavvy creates the instances.",
        ),
        project_flag(
            "public_address",
            "If `true`, instances in a public subnet get a public address. If `false`, instances "
            "need a NAT gateway or another route to the server.",
            default=True,
        ),
        project_text(
            "image",
            "The image of instances: its OCID, or its name in each region. The default is Oracle "
            "Linux with NVIDIA's driver for NVIDIA GPUs, and Ubuntu 24.04 without GPUs.",
        ),
        project_flag(
            "compute_clusters",
            "If `true`, a gang of several instances whose shape has RDMA gets its own compute "
            "cluster, so that the RDMA network connects its nodes. If `false`, their RDMA network "
            "is not used, and the user needs no right to manage compute clusters.",
            default=True,
        ),
        disk_setting(
            "The size of an instance's boot volume, unless the task requests another size.",
            100,
            minimum=50,
        ),
        text(
            "limits_endpoint",
            "The address of OCI's Limits API, which `cavvy nodes quota` reads. The address differs "
            "outside OCI's commercial regions.",
            "https://limits.{region}.oci.oraclecloud.com/20190729",
        ),
        reach_setting(),
    ),
    cloud="cavvy.providers.oci.cloud:OciCloud",
    layer="cavvy.providers.vm.provider:make_provider",
    zoned=True,
    more_abilities=(TELLS_QUOTAS,),
    project_key="cavvy.providers.oci.api",
    options={"image": "the OCID or the name of an image"},
)
