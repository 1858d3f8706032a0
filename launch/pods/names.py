"""Names that Kubernetes takes: labels of DNS; and that of a job."""

import hashlib
import re
from pathlib import PurePosixPath

from ...configs import Config

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""What claims and queues are named by; labels joined by dots."""
IMAGE = re.compile(
    r"([\w.-]+(:[0-9]{1,5})?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:\w[\w.-]{0,127})?(@[\w+.-]+:[0-9a-f]{32,})?",
    re.ASCII,
)
"""Registry, path in small letters, tag, digest."""
MOST_LABEL = 63
MOST_SUBDOMAIN = 253
MOST_NAME = 26
"""Characters of a job's name: with it twice, "-host-0-0." makes a label of Kubernetes, of 63."""
DIGEST = 6
"""Characters that tell names apart that were cut."""


def as_label(text: str, most: int) -> str:
    """Makes a label of DNS from any text: small letters, digits and dashes, a letter first.

    Args:
        text: Such as the name of a folder.
        most: Characters it may have; one that is cut ends with a digest of all of it.
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "run"
    if not label[0].isalpha():
        label = f"run-{label}"
    if len(label) <= most:
        return label
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST]
    return f"{label[: most - DIGEST - 1].rstrip('-')}-{digest}"


def is_label(text: str, most: int = MOST_LABEL) -> bool:
    """Tells whether a text is a label of DNS that begins with a letter."""
    return len(text) <= most and LABEL.fullmatch(text) is not None


def is_namespace(text: str) -> bool:
    """Tells whether a text is a label of DNS; a digit may come first."""
    return is_subdomain(text) and "." not in text and len(text) <= MOST_LABEL


def is_image(text: str) -> bool:
    """Tells whether a text names a container image."""
    return IMAGE.fullmatch(text) is not None


def is_subdomain(text: str) -> bool:
    """Tells whether a text names an object."""
    return len(text) <= MOST_SUBDOMAIN and SUBDOMAIN.fullmatch(text) is not None


def job_name(config: Config) -> str:
    """What the job is called: as the config says, or after the folder of the run."""
    return config.launch.kubernetes.name or as_label(PurePosixPath(config.run.dir).name, MOST_NAME)
