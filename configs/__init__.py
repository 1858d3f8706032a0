"""The typed schema of a run and the YAML presets.

Read `schema` for the keys, `load` for the way from a file to a `Config`, `validation` for checks of single values, and
`checks` for checks of keys against each other.
"""

from .checks import check_devices as check_devices
from .config_errors import ConfigError as ConfigError
from .config_text import describe_config as describe_config
from .config_text import resolved_yaml as resolved_yaml
from .load import load_config as load_config
from .schema import Config as Config
