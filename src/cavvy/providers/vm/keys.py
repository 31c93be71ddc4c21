"""Finds API keys: first in the file that the settings name, then in the cloud's usual environment
variables, then in the cloud's usual files. A key never appears in settings, messages or reports.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct
from cavvy.providers.base import ProviderSetting, Refused, SettingKind


class ApiKeySource(Struct, frozen=True, kw_only=True):
    """The places where a cloud's API key may be stored. In a file with lines such as `api_key =
    KEY`, the key follows one of `names`. A file that consists of one word contains only the key.
    """

    provider: str
    variables: Sequence[str]
    files: Sequence[str] = ()
    names: Sequence[str] = ("api_key",)
    made_at: str  # the page where users create a key

    def setting(self) -> ProviderSetting:
        """Return the setting that names the file with the key."""
        usual = [*(f"`{each}` in the environment" for each in self.variables)]
        usual += [f"`{each}`" for each in self.files]
        return ProviderSetting(
            name="key_file",
            kind=SettingKind.KEY_FILE,
            consequence=f"The file with the API key. The default is {', then '.join(usual)}.",
        ).for_projects()

    def read(self, settings: Mapping[str, Scalar]) -> str:
        """Return the key. Raises Refused with a list of the places that were searched."""
        return self.find(settings)[0]

    def find(self, settings: Mapping[str, Scalar]) -> tuple[str, str]:
        """Return the key, and the name of the file or environment variable that contains the key.
        Raises Refused with a list of the places searched.
        """
        named = settings.get("key_file")
        if named:
            return self._read_file(str(named)) or self._miss(
                [f"{self._describe(str(named))} (`key_file`)"]
            )
        for variable in self.variables:
            if key := os.environ.get(variable, "").strip():
                if len(key.split()) > 1:
                    raise Refused(f"[providers.{self.provider}]: ${variable} contains white space")
                return key, f"${variable}"
        for file in self.files:
            if found := self._read_file(file):
                return found
        files = map(self._describe, self.files)
        return self._miss([*(f"${each}" for each in self.variables), *files])

    def facts(
        self, settings: Mapping[str, Scalar], unknown: Sequence[str]
    ) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`: the file or variable that contains the key, and the
        accelerators that are not in the catalog.
        """
        names = [("unknown accelerators", ", ".join(unknown))] if unknown else []
        return [("API key", self.find(settings)[1]), *names]

    def _read_file(self, file: str) -> tuple[str, str] | None:
        try:
            text = Path(file).expanduser().read_text("utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "the file is not a text file"
            raise Refused(f"[providers.{self.provider}]: {file} cannot be read: {why}") from error
        words = "|".join(map(re.escape, self.names))
        # a name in quotation marks is from a file in JSON
        line = rf"^\s*[\"']?(?:{words})[\"']?\s*[=:][^\S\n]*[\"']?([^\s\"']+)"
        found = re.search(line, text, re.MULTILINE)
        key = found[1] if found else text if len(text.split()) == 1 else ""
        return (key, file) if key else None

    def _describe(self, file: str) -> str:
        """Return a file's name for a message about a missing key. If the file contains several
        words, the text also says why no key was found in the file.
        """
        path = Path(file).expanduser()
        if not path.is_file() or len(path.read_text("utf-8").split()) < 2:
            return file
        return f"{file} (it has several words, and no line `{self.names[0]} = KEY` with a key)"

    def _miss(self, places: Sequence[str]) -> tuple[str, str]:
        raise Refused(
            f"[providers.{self.provider}]: no API key in {', '.join(places)}; create one at "
            f"{self.made_at}, and put it in one of these places or in a file that `key_file` names"
        )


def list_setting(settings: Mapping[str, Scalar], name: str) -> Sequence[str]:
    """Return the values of a setting that contains a comma-separated list."""
    return [each.strip() for each in str(settings.get(name, "")).split(",") if each.strip()]
