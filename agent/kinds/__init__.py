"""The kinds, one file each. A new kind is a new file and a line here."""

from collections.abc import Sequence

from agent.kind import Kind
from agent.kinds.driver_binding import DriverBinding
from agent.kinds.gpu_settings import GpuSettingsKind
from agent.kinds.modules import ModulesKind
from agent.kinds.p2p import P2PKind
from agent.kinds.platform import PlatformKind
from agent.kinds.service import ServiceKind

ALL: Sequence[Kind] = (
    PlatformKind(),
    DriverBinding(),
    ModulesKind(),
    GpuSettingsKind(),
    P2PKind(),
    ServiceKind(),
)

__all__ = ["ALL"]
