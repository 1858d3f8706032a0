"""Libraries that come with an extra."""

from importlib.util import find_spec

from ....mesh.errors import UserError


def needs(module: str, extra: str) -> None:
    """Makes sure that a library is installed; imports nothing.

    Args:
        module: As it is imported.
        extra: What brings it.

    Raises:
        UserError: It is not; names the extra.
    """
    if find_spec(module) is None:
        raise UserError(f"{module} is not installed. Install it with: pip install 'spmdkit[{extra}]'.")
