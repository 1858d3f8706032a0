"""Expert parallel: placeholder of the options; the strategy follows."""

from dataclasses import dataclass

AXIS = "expert"


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Options of the strategy `expert`."""

    size: int = 1
    """Devices that share out the experts of a mixture; rows of a batch are split over them too; -1 = the rest."""
