"""The templates of the pages and drawings. They escape every value: the content of files never becomes markup."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..layouts.sizes import counted, format_bytes
from ..mesh.errors import printable
from ..mesh.files import write_text
from ..training.quantities import duration
from .charts import MARK_NAMES
from .drawings import axis_hue
from .time_course import shares

FOLDER = Path(__file__).parent


def _escape_hidden(value: Any) -> Any:
    """Escapes the control characters and bidirectional overrides of a value."""
    return printable(value) if type(value) is str else value


ENVIRONMENT = Environment(
    loader=FileSystemLoader(FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_escape_hidden,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"bytes": format_bytes, "duration": duration, "counted": counted}
ENVIRONMENT.globals |= {"hue": axis_hue, "shares": shares, "MARK_NAMES": MARK_NAMES}


def write_page(path: Path, template: str, **values: Any) -> None:
    """Renders a template and writes the page atomically.

    Args:
        path: The HTML file.
        template: The name of the template in this directory.
        values: The values of the template.
    """
    style = Markup((FOLDER / "report.css").read_text(encoding="utf-8"))
    script = Markup((FOLDER / "report.js").read_text(encoding="utf-8"))
    write_text(path, ENVIRONMENT.get_template(template).render(style=style, script=script, **values))
