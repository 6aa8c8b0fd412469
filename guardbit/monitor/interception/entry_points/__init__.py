"""One file for each function that people call for attention; CONTRIBUTING.md says what it has."""

from guardbit.monitor.interception.entry_points.base import EntryPoint
from guardbit.monitor.interception.entry_points.flex import FLEX
from guardbit.monitor.interception.entry_points.libraries import OF_LIBRARIES, VARLEN
from guardbit.monitor.interception.entry_points.multi_head import MULTI_HEAD
from guardbit.monitor.interception.entry_points.sdpa import SDPA
from guardbit.monitor.interception.entry_points.transformers_eager import EAGER

#: Every function that GuardBit stands in for. Where one calls another, each takes its own calls.
ENTRY_POINTS: tuple[EntryPoint, ...] = (SDPA, MULTI_HEAD, EAGER, FLEX, VARLEN, *OF_LIBRARIES)
