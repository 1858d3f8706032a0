"""The class of errors that users can correct; every package raises it or a subclass. Links to the documentation."""

SITE = "https://spmdkit.github.io/spmdkit/"
"""The site of the documentation, also in pyproject.toml and mkdocs.yml."""


def docs_url(page: str, heading: str = "") -> str:
    """Returns the URL of a page of the documentation, for messages.

    Args:
        page: Its file in docs/ without the ending: "models", "coming-from/keras".
        heading: The id of a heading: lowercase, dashes for spaces.
    """
    return f"{SITE}{page}.html{'#' * bool(heading)}{heading}"


class UserError(ValueError):
    """A mistake in a config, a file, an argument or a model: its message says what was given, the rule and the remedy.

    The command line prints the message alone and exits with `exit_code`. Every other error is one of ours: it is
    printed with its traceback.

    Attributes:
        exit_code: What the command line exits with.
    """

    exit_code = 2


class TooLateError(UserError, RuntimeError):
    """Something that JAX settles once was asked for after it had been settled."""
