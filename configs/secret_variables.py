"""Environment variables with names of secrets: their values are passed on by name and never written.

In redacted variables, None means "the value of the shell", as null does in a config, so that a redacted config can be
launched again.
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from ..mesh.errors import UserError
from .yaml_reader import read_yaml

SECRET = re.compile(
    r"(TOKEN|KEYS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PASSCODE|CREDENTIALS?|CREDS|(?<![^_])PASS"
    r"|(?<!^)(?<!^OLD)PWD)\d*(?=_|$)",
    re.IGNORECASE,
)
"""A word with such an ending, between underscores: HF_TOKEN, WANDB_API_KEY, PGPASSWORD, DB_PWD; not
TOKENIZERS_PARALLELISM, and not the shell's PWD and OLDPWD."""
SECTION = ("launch", "environment")


def is_secret(name: str) -> bool:
    """Returns whether a variable has the name of a secret."""
    return SECRET.search(name) is not None


def redact(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns environment variables with None in place of the values of secrets."""
    return {name: None if is_secret(str(name)) else value for name, value in variables.items()}


def redact_config(tree: Any, section: tuple[str, ...] = SECTION) -> Any:
    """Returns the plain values of a config, or of a section, without the values of secrets.

    Args:
        tree: The plain values; anything but a mapping is returned as it is.
        section: The path from `tree` to the variables.
    """
    if not isinstance(tree, Mapping):
        return tree
    if not section:
        return redact(tree)
    first, *rest = section
    return {key: redact_config(value, tuple(rest)) if key == first else value for key, value in tree.items()}


def redact_override(text: str) -> str:
    """Returns a `key=value` argument without the values of secrets, for messages and command lines."""
    key, equals, value = text.partition("=")
    parts = tuple(key.strip().split("."))
    if parts[:2] == SECTION and len(parts) > 2:
        return f"{key}{equals}null" if equals and is_secret(".".join(parts[2:])) else text
    if not equals or parts != SECTION[: len(parts)] or not SECRET.search(re.sub(r"\W+", "_", value)):
        return text
    document = read_yaml(value)
    if document.problems or not isinstance(document.value, Mapping):
        return f"{key}=<redacted>"
    return f"{key}={json.dumps(redact_config(document.value, SECTION[len(parts) :]), ensure_ascii=False)}"


def resolve(variables: Mapping[str, str | None]) -> dict[str, str]:
    """Returns environment variables with the values of the shell in place of None.

    Raises:
        UserError: The shell does not set some of them.
    """
    if missing := [name for name, value in variables.items() if value is None and name not in os.environ]:
        raise UserError(
            f"launch.environment takes {', '.join(missing)} from the shell, which does not set it. Set it (export "
            f"{missing[0]}=...), or remove it from the config."
        )
    return {name: os.environ[name] if value is None else value for name, value in variables.items()}
