"""The typed schema of a run and the YAML presets that fill it.

Read `schema` for every key, `load` for how a file becomes a `Config`, `checks` for the arithmetic; `reading/` is about
the text and its names.
"""

from .checks import check_devices as check_devices
from .errors import ConfigError as ConfigError
from .load import load_config as load_config
from .schema import Config as Config
from .write import describe_config as describe_config
from .write import resolved_yaml as resolved_yaml

__all__ = ["Config", "ConfigError", "check_devices", "describe_config", "load_config", "resolved_yaml"]
