"""What jobs see of the environment in which the server was started."""

from pathlib import Path

from cavvy.providers.hosts.environ import clean_environ


def test_the_servers_own_environment_is_on_no_jobs_path(tmp_path: Path) -> None:
    own, link = tmp_path / "venv", tmp_path / "link"
    (own / "bin").mkdir(parents=True)
    link.symlink_to(own)
    environ = {
        "PATH": f"{own}/bin:/usr/bin:{link}/bin/:/other/bin",
        "LD_LIBRARY_PATH": f"{own}/lib:/cuda/lib",
        "VIRTUAL_ENV": str(own),
        "PYTHONPATH": str(own),
        "PIP_TARGET": str(own),
        "LC_ALL": "C",
    }
    assert clean_environ(environ, {"PATH", "LD_LIBRARY_PATH"}, own=str(own)) == {
        "PATH": "/usr/bin:/other/bin",
        "LD_LIBRARY_PATH": "/cuda/lib",
        "LC_ALL": "C",
    }


def test_conda_itself_and_its_other_environments_stay(tmp_path: Path) -> None:
    path = f"{tmp_path}/envs/mine/bin:{tmp_path}/condabin:{tmp_path}/bin:/bin"
    assert clean_environ({"PATH": path}, {"PATH"}, own=str(tmp_path)) == {
        "PATH": f"{tmp_path}/envs/mine/bin:{tmp_path}/condabin:/bin"
    }


def test_a_python_that_is_no_environment_of_its_own_stays() -> None:
    assert clean_environ({"PATH": "/usr/bin:/bin"}, {"PATH"}, own="") == {"PATH": "/usr/bin:/bin"}
