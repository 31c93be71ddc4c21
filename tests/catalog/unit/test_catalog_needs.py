import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.catalog.accelerators import find_accelerator, list_accelerators
from cavvy.catalog.needs import MOST, NeedError, format_need, parse_accelerator
from cavvy.catalog.tpu_slices import count_chips, find_slice, list_slices, spread_slices
from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec

GIB = 1024


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("H100:8", [AcceleratorNeed(name="H100", count_min=8)]),
        ("h100-sxm5", [AcceleratorNeed(name="H100-SXM")]),
        (
            "A100-80GB:8",
            [
                AcceleratorNeed(
                    name="A100", count_min=8, memory_min_mib=80 * GIB, memory_max_mib=80 * GIB
                )
            ],
        ),
        (
            "A100:40GB..80GB:1..4",
            [
                AcceleratorNeed(
                    name="A100", count_max=4, memory_min_mib=40 * GIB, memory_max_mib=80 * GIB
                )
            ],
        ),
        ("L4:2..", [AcceleratorNeed(name="L4", count_min=2, count_max=MOST)]),
        ("24GB", [AcceleratorNeed(name="gpu", memory_min_mib=24 * GIB)]),
        ("nvidia:1", [AcceleratorNeed(name="nvidia")]),
        ("nvidia:H100:2", [AcceleratorNeed(name="H100", count_min=2)]),
        ("any", [AcceleratorNeed(name=None)]),
        (2, [AcceleratorNeed(name="gpu", count_min=2)]),
        ("tpu-v5litepod:4", [AcceleratorNeed(name="TPU-v5e", count_min=4)]),
        ("tpu-v5litepod-8", [AcceleratorNeed(name="TPU-v5e", count_min=8)]),
        ("TPU-v5e-8", [AcceleratorNeed(name="TPU-v5e", count_min=8)]),
        ("v4-8", [AcceleratorNeed(name="TPU-v4", count_min=4)]),
        ("TPU-v5p:2x2x4", [AcceleratorNeed(name="TPU-v5p", count_min=16)]),
        ("A10:0.5", [AcceleratorNeed(name="A10", part=0.5)]),
        ("A10:1/6", [AcceleratorNeed(name="A10", part=1 / 6)]),
        ("A10:.25|L4", [AcceleratorNeed(name="A10", part=0.25), AcceleratorNeed(name="L4")]),
        ("A10|L4:1/4", [AcceleratorNeed(name=name, part=0.25) for name in ("A10", "L4")]),
        (
            "H100|A100:8",
            [AcceleratorNeed(name="H100", count_min=8), AcceleratorNeed(name="A100", count_min=8)],
        ),
        (
            "H100:4|A100:8",
            [AcceleratorNeed(name="H100", count_min=4), AcceleratorNeed(name="A100", count_min=8)],
        ),
    ],
)
def test_a_wish_is_read(text: str | int, expected: list[AcceleratorNeed]) -> None:
    assert parse_accelerator(text) == tuple(expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("H1000:8", "did you mean H100?"),
        ("A10:3/2", "a fraction is between 0 and 1"),
        ("A10:1/0", "a fraction is between 0 and 1"),
        ("A10:" + "9" * 400 + "/1", "too large"),
        ("9" * 5000 + "x1", "too large"),
        ("H100:" + "9" * 5000, "too large"),
        ("H100:1.." + "9" * 5000, "too large"),
        ("A10:0." + "1" * 5000, "a fraction is between 0 and 1"),
        ("A10:0.5:2", "two counts"),
        ("tpu-v5litepod-8:4", "two counts"),
        ("A100:8+", "2.. (at least two)"),
        ("A100::8", "empty part"),
        ("A100:8:4", "two counts"),
        ("A100:80GB:40GB", "40GB..80GB"),
        ("A10:H100", "H100:8|A100:8"),
        ("A100:0", "at least 1"),
        ("A100:1.5", "a whole number for several GPUs"),
        ("A100:-0.5", "a fraction of one GPU between 0 and 1"),
        ("A100:0.001", "at least 0.01"),
        ("TPU-v5e:0.5", "only GPUs have fractions"),
        ("google:0.5", "only GPUs have fractions"),
        ("Trainium:share=8GB", "only GPUs have fractions"),
        ("A100:share=90GB", "larger than the memory of A100 (80GB)"),
        ("A100:40GB:share=60GB", "larger than the memory of A100 (40GB)"),
        ("A100:share=10", "share=10GB"),
        ("A100:share=0GB", "share=10GB"),
        ("A100:2:share=10GB", "delete the count"),
        ("A100:isolated", "whole GPUs are never shared"),
        ("A100:2:1g.10gb", "both a count and a MIG profile"),
        ("A100:80GB:1g.10gb", "already states a memory"),
        ("gpu:1g.10gb", "needs the name of one of NVIDIA's GPUs"),
        ("MI300X:1g.10gb", "needs the name of one of NVIDIA's GPUs"),
        ("A100:1g.100gb", "its memory is 80GB"),
        ("A100:4..2", "begin with its smaller number"),
        ("A100:80GB..40GB", "smaller size first"),
        ("A100:0GB", "a memory of 0"),
        ("any:..0GB", "a memory of 0"),
        ("", "expected accelerators such as H100:8"),
        ("H100||A100", "expected accelerators such as H100:8"),
        ("zzzz", "lists the known names"),
    ],
)
def test_a_wrong_wish_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(NeedError, match=re.escape(said)):
        parse_accelerator(text)


@given(
    st.sampled_from([row.name for row in list_accelerators()]),
    st.integers(1, 64),
    st.none() | st.integers(0, 64),
    st.none() | st.tuples(st.integers(1, 512), st.integers(0, 512)),
)
def test_what_is_printed_is_read_back(
    name: str, low: int, more: int | None, size: tuple[int, int] | None
) -> None:
    text = name + (f":{low}" if more is None else f":{low}..{low + more}")
    if size:
        text += f":{size[0]}GB..{sum(size)}GB"
    (need,) = parse_accelerator(text)
    assert parse_accelerator(format_need(need)) == (need,)


def test_every_alias_leads_to_its_own_row_only() -> None:
    for row in list_accelerators():
        for text in (row.name, *row.aliases):
            known = find_accelerator(text)
            assert known is not None
            assert known.accelerator is row, (
                f"{text} is claimed by {known.accelerator.name} and {row.name}"
            )


@pytest.mark.parametrize("part", [0.5, 1 / 6, 0.3, 0.123456])
def test_a_part_is_written_as_it_is_read(part: float) -> None:
    need = AcceleratorNeed(name="A10", part=part)
    assert parse_accelerator(format_need(need)) == (need,)


@pytest.mark.parametrize(
    ("text", "part", "memory"),
    [
        ("A100:share=10GB", 1 / 8, (10240, None)),
        ("A100:40GB:share=10GB:isolated", 1 / 4, (40960, 40960)),
        ("gpu:24GB:share=2GB", None, (24576, None)),
        ("any:share=512MB", None, (512, None)),
        ("nvidia:16GB..32GB:share=8GB", 1 / 4, (16384, 32768)),
    ],
)
def test_a_share_counts_as_the_smallest_part_that_has_its_memory(
    text: str, part: float | None, memory: tuple[int | None, int | None]
) -> None:
    (need,) = parse_accelerator(text)
    assert part is None or need.part == part
    assert 0 < need.part < 1
    assert (need.memory_min_mib, need.memory_max_mib) == memory
    assert parse_accelerator(format_need(need)) == (need,)


@pytest.mark.parametrize("text", ["A100:1g.10gb", "a100-80gb:1G.10GB", "A100:1g.10gb:isolated"])
def test_an_instance_is_named_by_the_family_and_its_profile(text: str) -> None:
    (need,) = parse_accelerator(text)
    assert (need.name, need.part, need.memory_min_mib) == ("A100-MIG-1g.10gb", 1 / 8, None)
    assert parse_accelerator(format_need(need)) == (need,)


def test_a_slice_has_the_cpus_and_the_memory_of_its_hosts() -> None:
    sizes = {each.type: (each.hosts, each.vcpus, each.memory_gib) for each in list_slices()}
    assert sizes["v5litepod-8"] == (1, 224, 384)
    assert sizes["v5litepod-16"] == (4, 448, 768)
    assert sizes["v6e-1"] == (1, 44, 176)
    assert sizes["v5p-8"] == (1, 208, 448)
    assert sizes["v3-8"] == (1, 0, 0), "the table does not state it"


def test_every_slice_of_tpus_has_the_chips_of_its_topology() -> None:
    for each in list_slices():
        assert count_chips(each.topology) == each.chips, each.type
        assert find_slice(f"tpu-{each.type}") is each
        assert parse_accelerator(each.type)[0].count_min == each.chips
        assert each.chips % each.hosts == 0
    assert find_slice("v5litepod-7") is None
    assert find_slice("H100-8") is None


def test_a_slice_of_several_hosts_on_one_node_becomes_a_request_for_its_hosts() -> None:
    def spread(text: str, instance: str | None = None) -> tuple[int, list[tuple[str | None, int]]]:
        needs = ResourceSpec(accelerators=parse_accelerator(text), instance=instance)
        found = spread_slices(needs)
        named = [(each.instance, each.accelerators[0].count_min) for each in found.needs.choices]
        return found.hosts, named

    assert spread("TPU-v5e:16") == (4, [("tpu-v5litepod-16", 4)])
    assert spread("v4-16") == (2, [("tpu-v4-16", 4)])
    both = [("tpu-v5litepod-16", 4), ("tpu-v6e-16", 4)]
    assert spread("TPU-v5e:16|TPU-v6e:16") == (4, both)
    # one host has so many chips, no slice has, or alternatives have other numbers of hosts
    for text in ("TPU-v5e:8", "TPU-v5e:4", "TPU-v5e:12", "TPU-v5e:8..16", "TPU-v5e:16|H100:8"):
        assert spread(text)[0] == 1
    assert spread("TPU-v5e:16", "tpu-v5litepod-16")[0] == 4
    assert spread("TPU-v5e:16", "ct5lp-hightpu-8t")[0] == 1


@pytest.mark.parametrize("size", ["2..4", "0.5", "share=10GB", "1g.10gb"])
def test_an_alternative_without_a_size_has_that_of_the_next_one(size: str) -> None:
    assert parse_accelerator(f"A100|H100:{size}") == parse_accelerator(f"A100:{size}|H100:{size}")
