"""What commands of jobs ask of services (`cavvy.cli.reach.services.ServiceCommands`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cavvy.client.service_wire import NamedService
    from cavvy.task_files import ReadOptions


class CommandParts:
    """What the commands ask; it imports only what is asked."""

    def serve_file(
        self,
        file: str,
        options: "ReadOptions",
        params: dict[str, str],
        *,
        yes: bool,
        project: str | None,
        name: str | None,
        output: str,
    ) -> None:
        """See `ServiceCommands.serve_file`."""
        from cavvy.capabilities.serving.serve_command import serve_file

        serve_file(file, options, params, yes=yes, project=project, name=name, output=output)

    def show_service(self, found: "NamedService", output: str) -> None:
        """See `ServiceCommands.show_service`."""
        from cavvy.capabilities.serving.services_command import show_service
        from cavvy.capabilities.serving.wire import find_service
        from cavvy.cli.reach.session import session

        with session() as client:
            served = find_service(client, found.project, found.name)
        show_service(served, output)
