"""`cavvy deploy`: serves the model that a job has trained, or a published one."""

import getpass
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import JOBS_LISTING, complete_jobs
from cavvy.cli.reach.session import project_option, session
from cavvy.cli.task.load import param_option, yes_option
from cavvy.cli.task.programs import DeployCommand
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import NameArgument
from cavvy.cli.view.output import json_option

if TYPE_CHECKING:
    from cavvy.capabilities.serving.deployment import Deployment, ModelChoice
    from cavvy.client import ApiClient
    from cavvy.client.model_wire import ModelView
    from cavvy.client.service_wire import NamedService


def _require(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None and not ctx.resilient_parsing:
        raise click.MissingParameter(ctx=ctx, param=param)
    return value


@click.command("deploy", cls=DeployCommand)
@click.argument(
    "name",
    cls=NameArgument,
    listing=JOBS_LISTING,
    metavar="JOB|MODEL@NUMBER|FILE.py",
    shell_complete=complete_jobs,
)
@click.option(
    "--as",
    "service",
    callback=_require,
    metavar="NAME",
    help="The name of the service; required, except for FILE.py.",
)
@click.option(
    "--service",
    "file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="The file of the service. The program of the service finds the files of the job in the "
    "folder `model`. Without this option, the service uses the resources, image, setup and "
    "folder of the job.",
)
@click.option(
    "--from",
    "source",
    type=click.Choice(["checkpoint", "outputs"]),
    help="Where the model is. The default is the outputs of the job or, if it has none, its "
    "newest checkpoint.",
)
@click.option("--engine", metavar="NAME", help="The engine, such as vllm; see `service.engine`.")
@click.option("--model", metavar="PATH", help="The model's file or folder in the job's files.")
@param_option
@project_option
@yes_option
@json_option
def command(
    name: str,
    service: str,
    file: str | None,
    source: str | None,
    engine: str | None,
    model: str | None,
    param: tuple[str, ...],
    project: str,
    yes: bool,
    output: str,
) -> None:
    """Serve the model that a job has trained, or a published version of a model, or deploy the
    functions of a file.

    The engine is chosen by the files: a Hugging Face folder is served by vLLM, a .gguf file by
    llama.cpp, a .onnx file by ONNX Runtime, and a model repository by Triton. For a model without a
    known engine, pass --service with a file that has `run`. The engine must be in the job's image,
    or installed by the job's setup.

    MODEL@NUMBER, or MODEL@LABEL with a label of `cavvy model promote`, serves a version that `cavvy
    model publish` published. If it was not published from a job, pass --service.

    FILE.py deploys the functions of its apps, for calls from any program; of the options, it takes
    only --project and --yes.
    """
    from cavvy.capabilities.serving.deployment import ModelChoice, prepare, prepare_file
    from cavvy.cli.reach.names import find_job
    from cavvy.cli.reach.published import find_version
    from cavvy.cli.reach.services import await_url
    from cavvy.client.service_wire import find_named_service

    if file is not None and (engine or model):
        raise CommandFailure(
            "the file of --service already names the engine and the model", exit_code=2
        )
    with session() as client:
        choice = ModelChoice(source=source or "", engine=engine or "", path=model or "")
        version = find_version(client, project, name) if "@" in name else None
        if version is not None:
            found = _prepare_version(client, version, service, file, param, choice)
        else:
            job = find_job(client, project, name)
            found = (
                prepare(client, job, service, param, choice)
                if file is None
                else prepare_file(client, job, file, param, choice)
            )
        _start(client, project, service, found, yes=yes)
        served = await_url(client, project, service, find_named_service)
    of = version.name if version else f"job {name}"
    _say_deployed(served, f"{found.what} of {of}", output)


def _prepare_version(
    client: "ApiClient",
    version: "ModelView",
    service: str,
    file: str | None,
    param: tuple[str, ...],
    choice: "ModelChoice",
) -> "Deployment":
    from cavvy.capabilities.serving.deployment import prepare, prepare_version

    if choice.source:
        raise CommandFailure("--from is for jobs: a version has its own files", exit_code=2)
    if file is not None:
        return prepare_version(client, version, file, param)
    if not version.job:
        raise CommandFailure(
            f"{version.name} was not published from a job, whose resources and image the service "
            "would use",
            "add --service FILE",
            exit_code=2,
        )
    job = client.job(version.project, version.job)
    return prepare(client, job, service, param, choice, version)


def _start(
    client: "ApiClient", project: str, service: str, found: "Deployment", *, yes: bool
) -> None:
    from cavvy.cli.task.submission import ask_consent
    from cavvy.client.service_wire import put_service

    ask_consent(
        yes,
        lambda consent: put_service(
            client,
            found.text,
            project=project,
            name=service,
            path=found.path,
            params=found.params,
            origin=found.origin,
            user=getpass.getuser(),
            consent=consent,
        ),
    )


def _say_deployed(served: "NamedService", what: str, output: str) -> None:
    from cavvy.capabilities.serving.reach import list_advice

    if output == "json":
        from cavvy.cli.view.output import json_out

        names = ("name", "project", "url", "revision")
        json_out({name: getattr(served, name) for name in names})
        return
    click.echo(f"service {served.name} is at {served.url}/ (revision {served.revision})")
    click.echo(f"the service serves {what}")
    click.echo("\n".join(list_advice(served)))
