"""Versions, and whether they fit each other."""

import platform
from collections.abc import Mapping
from importlib.metadata import distributions

from .finding import Finding

SHOWN = ("spmdkit", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "grain")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-rocm7-plugin")
INSTALL = "pip install --upgrade 'spmdkit[cuda]'"


def installed() -> dict[str, str]:
    """The versions of the packages that matter, by name; what is not installed is left out."""
    wanted = {*SHOWN, *PLUGINS}
    found = {(each.name or "").lower().replace("_", "-"): each.version for each in distributions()}
    return {name: found[name] for name in (*SHOWN, *PLUGINS) if name in found and name in wanted}


def software(versions: Mapping[str, str]) -> list[Finding]:
    """Checks versions against each other.

    Args:
        versions: By package.
    """
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    found = [Finding("versions", f"{said}, Python {platform.python_version()}")]
    missing = [name for name in ("jax", "jaxlib") if name not in versions]
    if missing:
        return [*found, Finding("versions", f"{' and '.join(missing)} not installed", "wrong", "pip install spmdkit")]
    jax, jaxlib = versions["jax"], versions["jaxlib"]
    if jax != jaxlib:
        found.append(Finding("versions", f"jax {jax} with jaxlib {jaxlib}", "wrong", f"pip install jaxlib=={jax}"))
    plugins = {name: version for name, version in versions.items() if name in PLUGINS}
    odd = [f"{name} {version}" for name, version in plugins.items() if version != jaxlib]
    if odd:
        found.append(Finding("versions", f"jaxlib {jaxlib} with {', '.join(odd)}", "wrong", INSTALL))
    kinds = sorted({name.rpartition("-")[0] for name in plugins})
    if len(kinds) > 1:
        remove = f"pip uninstall {' '.join(name for name in plugins if name.startswith(kinds[0]))}"
        found.append(Finding("versions", f"plugins for {' and '.join(kinds)} beside each other", "wrong", remove))
    return found
