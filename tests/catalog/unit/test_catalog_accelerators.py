import pytest

from cavvy.catalog.accelerators import (
    AcceleratorKind,
    Precision,
    find_accelerator,
    identify,
    is_match,
    list_accelerators,
    names_matching,
    suggest,
    virtual_profile,
)


@pytest.mark.parametrize(
    ("product", "reported_mib", "name", "nominal_gib"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "A100", 80),
        ("NVIDIAA100-PCIE-40GB", None, "A100", 40),
        ("teslav100", 16384, "V100", 16),
        ("NVIDIA H100 80GB HBM3", 81559, "H100", 80),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIe", 80),
        ("NVIDIA H100 NVL", 95830, "H100-NVL", 94),
        ("NVIDIA H200", 143771, "H200", 141),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090", 24),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX6000-Ada", 48),
        ("Quadro RTX 6000", 24576, "RTX6000", 24),
        ("NVIDIA L4", 23034, "L4", 24),
        ("AMD Instinct MI300X", 196592, "MI300X", 192),
        ("Tesla T4", 15360, "T4", 16),
        ("Radeon Pro V520", None, "V520", 8),
    ],
)
def test_what_a_driver_says_is_recognised(
    product: str, reported_mib: int | None, name: str, nominal_gib: int
) -> None:
    known = identify(product, reported_mib)
    assert known is not None
    assert (known.accelerator.name, known.memory_mib) == (name, nominal_gib * 1024)


@pytest.mark.parametrize("product", ["Matrox G200", "NVIDIA GeForce RTX 3060 Laptop GPU", ""])
def test_a_product_that_the_table_lacks_is_not_guessed(product: str) -> None:
    assert identify(product, 6144) is None


def test_a_family_means_each_of_its_products_and_a_form_means_one() -> None:
    assert names_matching("H100") == {"H100", "H100-PCIe", "H100-NVL"}
    assert names_matching("H100-SXM") == {"H100"}
    assert names_matching("tpu") == {
        row.name for row in list_accelerators() if row.kind is AcceleratorKind.TPU
    }
    assert is_match("MI300X", "amd")
    assert not is_match("MI300X", "nvidia")
    assert is_match("Some Future GPU", "gpu")
    assert not is_match("Some Future GPU", "H100")


def test_the_table_holds_facts_of_every_kind() -> None:
    rows = list_accelerators()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.kind for row in rows} == set(AcceleratorKind)
    for row in rows:
        assert row.source, row.name
        assert list(row.memory) == sorted(row.memory, key=lambda memory: memory.mib), row.name
        if Precision.BF16 in row.peak and Precision.FP8 in row.peak:
            assert row.peak[Precision.FP8] >= row.peak[Precision.BF16], row.name


def test_bandwidth_is_the_variants() -> None:
    known = find_accelerator("A100")
    assert known is not None
    assert known.accelerator.bandwidth(40 * 1024) == 1555
    assert known.accelerator.bandwidth() == 2039


def test_a_misspelt_name_is_corrected() -> None:
    assert suggest("H10O") == "H100"
    assert suggest("Rtx409O") == "Rtx4090"
    assert suggest("nvida") == "nvidia"
    assert suggest("qqqqqq") is None


@pytest.mark.parametrize(
    ("name", "product", "gib"),
    [
        ("A10 (24 GB PCIe)", "A10", 24),
        ("NVIDIA L4 PCIe 24GB", "L4", 24),
        ("L40S PCIe", "L40S", None),
        ("H100 (80 GB PCIe)", "H100-PCIe", 80),
        ("A100 (40 GB PCIe)", "A100", 40),
        ("T9000 (24 GB PCIe)", None, None),
    ],
)
def test_a_name_with_its_slot_and_memory_in_parentheses_is_known(
    name: str, product: str | None, gib: int | None
) -> None:
    known = find_accelerator(name)
    assert (known and known.accelerator.name) == product
    assert known is None or known.memory_mib == (gib and gib * 1024)


@pytest.mark.parametrize(
    ("product", "name", "gb", "profile"),
    [
        ("GRID A100-10C", "A100", 10, "10C"),
        ("NVIDIA A100DX-1-10CME", "A100", 10, "1-10CME"),
        ("GRID-A100D-80C", "A100", 80, "80C"),
        ("nvidia_h100xm-80c", "H100", 80, "80C"),
        ("NVIDIA H100L-94C", "H100-NVL", 94, "94C"),
        ("NVIDIA H200-35C", "H200-NVL", 35, "35C"),
        ("NVIDIA L40S-48C", "L40S", 48, "48C"),
        ("GRID V100D-32Q", "V100", 32, "32Q"),
        ("GRID M60-2B4", "M60", 2, "2B4"),
        ("GRID RTX6000P-24Q", "RTX6000", 24, "24Q"),
        ("NVIDIA RTX6000-Ada-48Q", "RTX6000-Ada", 48, "48Q"),
        ("NVIDIA RTX Pro 6000 Blackwell DC-4-96Q", "RTX-PRO-6000", 96, "4-96Q"),
    ],
)
def test_a_virtual_gpu_has_the_memory_of_its_profile(
    product: str, name: str, gb: int, profile: str
) -> None:
    known = identify(product, gb * 1000)
    assert known is not None
    assert (known.accelerator.name, known.memory_mib) == (name, gb * 1024)
    assert virtual_profile(product) == profile


@pytest.mark.parametrize("name", ["A100-10C", "NVIDIA Z9-10C", "NVIDIA GeForce RTX 4090"])
def test_other_names_are_no_virtual_gpus(name: str) -> None:
    known = find_accelerator(name)
    assert known is None or not virtual_profile(name)
