"""Import of configurations of other GRPO systems: verl and RLinf."""

from grpo_megatron.importers.convert import Import, import_settings, to_yaml
from grpo_megatron.importers.mapping import System
from grpo_megatron.importers.rlinf import RLINF
from grpo_megatron.importers.settings import Settings
from grpo_megatron.importers.sources import read_hydra_folder, read_settings
from grpo_megatron.importers.verl import VERL

SYSTEMS: dict[str, System] = {"verl": VERL, "rlinf": RLINF}

__all__ = [
    "RLINF",
    "SYSTEMS",
    "VERL",
    "Import",
    "Settings",
    "System",
    "import_settings",
    "read_hydra_folder",
    "read_settings",
    "to_yaml",
]
