"""What supervisors read on hosts becomes machines, hosts and offers."""

from pathlib import Path

import pytest
from tests import records

from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.domain.values import replace
from cavvy.providers.hosts.fleet.machines import (
    KnownHost,
    SmiReading,
    SupervisorFacts,
    list_offers,
    make_hosts,
    make_machine,
)
from cavvy.providers.hosts.supervisor.facts import ask_smi
from cavvy.providers.ssh.inventory import InventoryHost

ENTRY = InventoryHost(name="h1", group="lab", rate=parse_rate("2"), folder="~/x")
FACTS = replace(
    records.FACTS,
    smi=SmiReading(rows=[[str(n), f"GPU-{n}", "Tesla T4", "15360", "[N/A]"] for n in range(2)]),
)
NODE = "/sys/class/kfd/kfd/topology/nodes/1"
AMD = {
    f"{NODE}/properties": "simd_count 304\ndevice_id 29857\nunique_id 5\ndrm_render_minor 128",
    f"{NODE}/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {192 << 30}",
}


def known(
    entry: InventoryHost = ENTRY, facts: SupervisorFacts = FACTS, *, ready: bool = True
) -> KnownHost:
    return KnownHost(
        provider="ssh", entry=entry, facts=facts, machine=make_machine(entry, facts), ready=ready
    )


def test_nvidia_amd_and_limits() -> None:
    machine = make_machine(ENTRY, FACTS)
    assert [(each.id, each.index, each.memory_mib) for each in machine.devices] == [
        ("GPU-0", 0, 15360),
        ("GPU-1", 1, 15360),
    ]
    amd = replace(FACTS, smi=SmiReading(), files=AMD, usable=["/dev/kfd"])
    assert [(each.vendor, each.product) for each in make_machine(ENTRY, amd).devices] == [
        ("amd", "Instinct MI300X")
    ]
    assert "render" in make_machine(ENTRY, replace(amd, usable=[])).notes[0]
    group = {"/proc/self/cgroup": "0::/user", "/sys/fs/cgroup/user/cpu.max": "150000 100000"}
    assert make_machine(ENTRY, replace(FACTS, files=group)).cpus == 1.5
    less = make_machine(replace(ENTRY, cpus=2, memory_gib=1, accelerators=False), FACTS)
    assert (less.cpus, less.memory_mib, less.devices) == (2, 1024, ())


def test_hosts_have_labels_and_islands_of_nvlink() -> None:
    rows = [[str(n), f"GPU-{n}", "NVIDIA GB200", "189471", "[N/A]"] for n in range(4)]
    links = "GPU0 GPU1 GPU2 GPU3 CPU\n" + "".join(
        f"GPU{n} {' '.join('X' if n == other else 'NV18' for other in range(4))} 0-71\n"
        for n in range(4)
    )
    fabric = "01234567-89ab-cdef-0123-456789abcdef, 7\n" * 4
    facts = replace(FACTS, smi=SmiReading(rows=rows, links=links, fabric=fabric))
    domain = ("nvlink", "01234567-89ab-cdef-0123-456789abcdef.7")
    (host,) = make_hosts([known(replace(ENTRY, labels={"rack": "r1"}), facts)])
    assert host.labels == (domain, ("rack", "r1"))
    assert host.islands == (("GPU-0", "GPU-1", "GPU-2", "GPU-3"),)
    (host,) = make_hosts([known(replace(ENTRY, labels={"nvlink": "n1"}), facts)])
    assert host.labels == (("nvlink", "n1"),)
    (plain,) = make_hosts([known()])
    assert (plain.labels, plain.islands) == ((), ())


def test_gpus_that_cannot_be_used_are_told() -> None:
    broken = make_machine(ENTRY, replace(FACTS, smi=SmiReading(error="no driver")))
    assert not broken.devices
    assert "no driver" in broken.notes[0]
    split = replace(FACTS, smi=SmiReading(rows=[["0", "GPU-0", "NVIDIA A100", "40960", "Enabled"]]))
    assert "MIG" in make_machine(ENTRY, split).notes[0]


LISTING = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-0)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-1)
  MIG 3g.40gb     Device  0: (UUID: MIG-a)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-GPU-1/7/0)
"""
SMI_PROGRAM = """\
#!/bin/sh
case "$*" in
"--query-gpu=index,uuid,name,memory.total,mig.mode.current --format=csv,noheader,nounits")
    printf '%s, GPU-%s, NVIDIA A100-SXM4-80GB, 81920, %s\\n' 0 0 Disabled 1 1 Enabled ;;
"-L") printf '{listing}' ;;
*) echo "unknown option" >&2; exit 2 ;;
esac
"""


def test_the_instances_that_nvidia_smi_lists_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI_PROGRAM.format(listing=LISTING.replace("\n", "\\n")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CAVVY_MIG_FOLDER", str(tmp_path / "records"))
    reading = SmiReading(**ask_smi())
    machine = make_machine(ENTRY, replace(FACTS, smi=reading))
    assert [(each.id, each.index, each.profile) for each in machine.devices] == [
        ("GPU-0", 0, ""),
        ("MIG-a", 1, "3g.40gb"),
        ("MIG-GPU-1/7/0", 1, "1g.10gb+me"),
    ]
    offers = [each.accelerator for each in list_offers([known(facts=replace(FACTS, smi=reading))])]
    assert offers == [None, "A100", "A100-MIG-3g.40gb", "A100-MIG-1g.10gb+me"]


@pytest.mark.parametrize(
    ("errors", "remaps", "problem"),
    [
        ("GPU-0, 0\nGPU-1, 0", "GPU-0, No, No\nGPU-1, No, No", ""),
        ("GPU-0, 0\nGPU-1, [N/A]", "GPU-1, 0, 0", ""),
        ("GPU-1, 3", "", "3 uncorrected memory errors"),
        ("GPU-1, 0", "GPU-1, Yes, No", "must be reset"),
        ("", "GPU-1, 1, 1", "remapping a row failed"),
        ('Field "x" is not a valid field to query.', "garbage", ""),
        ("GPU-1", "GPU-1,", ""),
        ("GPU-0, Yes\nGPU-1, ²", "GPU-1, ³, no", ""),
        (f"GPU-1, {'9' * 5000}", "", ""),
    ],
)
def test_a_gpu_whose_memory_is_faulty_is_named(errors: str, remaps: str, problem: str) -> None:
    smi = replace(FACTS.smi, errors=errors, remaps=remaps)
    (host,) = make_hosts([known(facts=replace(FACTS, smi=smi))])
    assert [device for device, _ in host.sick] == (["GPU-1"] if problem else [])
    assert all(problem in why for _, why in host.sick)
    assert host.devices == ("GPU-0", "GPU-1"), "work that runs there keeps it"


def test_offers_of_hosts_and_groups() -> None:
    other = known(replace(ENTRY, name="h2"), replace(FACTS, cpus=4, smi=SmiReading()), ready=False)
    alone = known(replace(ENTRY, name="h3", in_group=False, rate=HourlyRate(7)))
    offers = {(o.zone, o.accelerator_count): o for o in list_offers([known(), other, alone])}
    assert len({offer.key for offer in offers.values()}) == len(offers)
    assert offers["h1", 2].rate == parse_rate("4")
    assert (offers["h1", 0].capacity, offers["h2", 0].capacity) == (1, 0)
    assert (offers[None, 0].capacity, offers[None, 0].vcpus) == (1, 4)
    assert (None, 1) not in offers  # only one host of the group has a GPU
    hosts = {host.name: host for host in make_hosts([known(), other, alone])}
    assert [hosts[f"ssh/h{n}"].group for n in (1, 2, 3)] == ["ssh/lab", "ssh/lab", "ssh/h3"]
    assert not hosts["ssh/h2"].ready
    assert hosts["ssh/h1"].kinds == ("T4-16GB", "T4-16GB")
