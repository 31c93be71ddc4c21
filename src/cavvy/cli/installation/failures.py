"""Error messages for commands that use the state folder while no server runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from cavvy.cli.view.failure import CommandFailure


@contextmanager
def folder_failures() -> Iterator[None]:
    """Turn errors of the state folder, the settings, the database and the disk into a
    CommandFailure.
    """
    from cavvy.providers.base import ProviderError
    from cavvy.server.state_dir import StateDirError
    from cavvy.settings import SettingsError
    from cavvy.store.base import StoreError

    try:
        yield
    except (StateDirError, SettingsError) as error:
        raise CommandFailure(error.message, error.hint) from error
    except StoreError as error:
        raise CommandFailure(str(error)) from error
    except ProviderError as error:
        raise CommandFailure(str(error), "`cavvy check` checks every provider") from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        hint = "check the path, the permissions and the free space"
        raise CommandFailure(f"{where}{error.strerror or error}", hint) from error
