"""The messages about a pod to which the server cannot send its Python."""

import asyncio
import re
from pathlib import Path
from typing import cast

import pytest

from cavvy.providers.base import Refused
from cavvy.providers.hosts.bundles import platform
from cavvy.providers.kubernetes.api import KubernetesApi
from cavvy.providers.kubernetes.exec_tunnels import ExecTunnels


def test_the_error_for_another_platform_names_both_platforms(tmp_path: Path) -> None:
    # the platform is compared before the first request, so no API server is needed
    tunnels = ExecTunnels(cast(KubernetesApi, None), "127.0.0.1:1", tmp_path)
    with pytest.raises(
        Refused, match=re.escape(f"this Python is for {platform()}, not Plan9 mips64")
    ):
        asyncio.run(tunnels._bring_python("pod-0", "Plan9 mips64"))
