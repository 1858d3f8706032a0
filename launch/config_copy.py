"""The copy of a config that all processes and all attempts of a launch read.

A launch reads its YAML file once, and resolves it: every key has a value. The copy is in the logs of the run; its name
contains a digest of its content, so that a later launch with another config writes another file. The user may edit the
YAML file while the run waits or trains. Kubernetes gets the resolved config as a config map instead, see manifest.py.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..configs.config_sources import CONFIG, PRESETS
from ..configs.config_text import resolved_yaml
from ..configs.schema import Config
from ..configs.secret_variables import is_secret
from ..mesh.errors import printable
from ..mesh.files import absolute_path, write_text

DIGEST_CHARACTERS = 12
PRIVATE = 0o600


class ConfigCopy(NamedTuple):
    """A resolved config and its file.

    Attributes:
        path: The file. A relative path starts from the working directory of each process, as run.dir does.
        text: The content of the file; secrets are null.
        arguments: The arguments of `spmdkit train` that make a process read the file.
        mode: The permissions of the file; None = the default.
    """

    path: str
    text: str
    arguments: tuple[str, ...]
    mode: int | None

    @property
    def digest(self) -> str:
        """The digest in the name of the file."""
        return _digest(self.text)

    def write(self) -> None:
        """Writes the file, unless it is complete already.

        Raises:
            UserError: Something other than a file has its name.
            OSError: The file cannot be written.
        """
        path = Path(self.path)
        with suppress(OSError):
            if path.read_bytes() == self.text.encode():
                return
        write_text(path, self.text, mode=self.mode)


def make_copy(config: Config, source: str, directory: str | Path) -> ConfigCopy:
    """Returns the copy of a config; nothing is written yet.

    Args:
        config: The config of the launch.
        source: Its file or preset, as the user has given it.
        directory: The directory of the copy.
    """
    title = f"# The config of a launch of {printable(source)}, with every key. Its processes read this copy."
    text = f"{title}\n{resolved_yaml(config)}"
    path = str(Path(directory) / f"config-{_digest(text)}.yaml")
    has_secret = any(map(is_secret, config.launch.environment))
    return ConfigCopy(path, text, (path, *_root_argument(config, source)), PRIVATE if has_secret else None)


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file; "" if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return ""


def is_edited(config: Config) -> bool:
    """Returns whether a user may edit the file of a config: it is neither a preset nor written by the run itself."""
    if config.source is None or config.source.parent == PRESETS:
        return False
    return absolute_path(config.source) != absolute_path(config.run.dir) / CONFIG


def _root_argument(config: Config, source: str) -> list[str]:
    """Returns the override of run.root for the processes of a launch.

    The copy contains an absolute directory. If the user gave a relative file, the directory of that file starts from
    the working directory of each process: a host may mount it elsewhere.
    """
    if config.source is None or Path(source).is_absolute():
        return []
    is_preset = config.source.parent == PRESETS
    directory = Path() if is_preset else config.source.parent
    if config.run.root != str(directory.absolute()):
        return []
    return [f"run.root={json.dumps(str(directory))}"]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
