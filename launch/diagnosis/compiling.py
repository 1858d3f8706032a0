"""Where compiled programs are kept, and what XLA is told: XLA_FLAGS, and options of the step."""

import os
from collections.abc import Mapping

from ...configs.schema import RunConfig
from ...mesh.joining.accelerators import gpus_of_host
from ..compiling.cache import Place, describe, on_cpu, place_of
from ..compiling.flags import unknown_flags
from ..compiling.options import XlaOptions, chosen
from .finding import Finding


def compiling(run: RunConfig, simulated: int, environ: Mapping[str, str]) -> list[Finding]:
    """Looks at how a run here would compile; opens no device.

    Args:
        run: The section of the config.
        simulated: CPU devices that each process simulates; 0 = the machine's real devices.
        environ: Of this process.
    """
    flags = environ.get("XLA_FLAGS", "").strip()
    platform = "cpu" if on_cpu(simulated) else "cuda" if gpus_of_host() else "tpu"
    return [
        programs(place_of(run.cache, on_cpu=platform == "cpu")),
        *([told(flags, unknown_flags(environ))] if flags else []),
        Finding("XLA options", f"{XlaOptions(chosen(run.xla, platform))} (run.xla)"),
    ]


def programs(place: Place) -> Finding:
    """Where compiled programs are kept.

    Args:
        place: As the config and the environment say it.
    """
    above = place.folder
    while above and not os.path.exists(above):
        above = os.path.dirname(above)
    if place.folder and "://" not in place.folder and not (os.path.isdir(above) and os.access(above, os.W_OK)):
        said = f"{place} cannot be written to: every start compiles anew"
        return Finding("programs", said, "note", "set run.cache to a folder that can be written to")
    return Finding("programs", describe(place))


def told(flags: str, unknown: str) -> Finding:
    """What XLA_FLAGS say.

    Args:
        flags: They.
        unknown: What of them XLA does not know.
    """
    if unknown:
        fix = "take it out of XLA_FLAGS, or look for its new name"
        return Finding("XLA_FLAGS", f"XLA does not know {unknown} and ends the process", "wrong", fix, "XLA_FLAGS")
    return Finding("XLA_FLAGS", flags, variable="XLA_FLAGS")
