"""Which NVIDIA driver runs which image."""

import pytest

from cavvy.agent.images.compatibility import OLDEST_NVIDIA_DRIVERS, find_objection, parse

REQUIRE = "cuda>=12.4 brand=tesla,driver>=470,driver<471 brand=tesla,driver>=535,driver<536"


@pytest.mark.parametrize(
    ("env", "driver", "told"),
    [
        ({}, "100.1", None),
        ({"CUDA_VERSION": "12.4.1"}, "525.60.13", None),
        ({"CUDA_VERSION": "12.4.1"}, "525.60.12", "CUDA 12.4, which needs NVIDIA driver 525.60.13"),
        (
            {"CUDA_VERSION": "13.0.0"},
            "575.57.08",
            "needs NVIDIA driver 580 or newer; this node has 575.57.08",
        ),
        ({"CUDA_VERSION": "11.8.0"}, "450.80.02", None),
        ({"CUDA_VERSION": "10.1.243"}, "410.48", "418.39"),
        ({"CUDA_VERSION": "14.0"}, "575.57.08", "CUDA 14.0"),
        ({"NVIDIA_REQUIRE_CUDA": REQUIRE}, "470.82.01", None),
        ({"NVIDIA_REQUIRE_CUDA": REQUIRE}, "471.10", "525.60.13"),
        ({"NVIDIA_REQUIRE_CUDA": REQUIRE, "CUDA_VERSION": "10.0"}, "510.39", "CUDA 12.4"),
        ({"CUDA_VERSION": "12.4.1", "NVIDIA_DISABLE_REQUIRE": "true"}, "470.1", None),
        ({"CUDA_VERSION": "unknown"}, "470.1", None),
    ],
)
def test_drivers(env: dict[str, str], driver: str, told: str | None) -> None:
    objection = find_objection(env, {}, driver)
    assert objection is None if told is None else told in str(objection)


def test_nobody_knows_without_a_driver() -> None:
    assert find_objection({"CUDA_VERSION": "12.4.1"}, {}, None) is None


def test_a_label_says_it_too() -> None:
    assert find_objection({}, {"com.nvidia.cuda.version": "12.1"}, "470.1") is not None


def test_the_table_falls() -> None:
    rows = [(cuda, parse(driver)) for cuda, driver in OLDEST_NVIDIA_DRIVERS]
    assert rows == sorted(rows, reverse=True)
