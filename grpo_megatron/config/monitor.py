"""The section `monitor` of the configuration."""

from typing import Literal

from grpo_megatron.config.options import FilledText, dataclass, option

# Services that scalars can be sent to, besides the run's folder. monitoring.optional implements them.
LISTENERS = ("wandb", "prometheus")


@dataclass
class MonitorConfig:
    samples_every: int = option(
        10, "show some of a step's groups as text every this many steps; 0: never", "steps", ge=0
    )
    sample_groups: int = option(2, "groups shown at a time", gt=0)
    sample_characters: int = option(
        4000,
        "most characters shown of a prompt or a response; the middle of a longer one is left out",
        "characters",
        ge=100,
    )
    histograms_every: int = option(
        1,
        "histograms of rewards, response lengths and advantages every this many steps; 0: never",
        "steps",
        ge=0,
    )
    timeline_mib: int = option(
        64, "size at which timeline.json becomes timeline.previous.json and a new one begins", "MiB", gt=0
    )
    listeners: list[Literal[LISTENERS]] = option(
        [],
        "where scalars go besides the run's folder: wandb (Weights & Biases), prometheus",
    )
    wandb_project: FilledText = option(
        "grpo-megatron", "project of the run in Weights & Biases, with monitor.listeners=[wandb]"
    )
    prometheus_address: FilledText = option(
        "127.0.0.1",
        "address at which Prometheus may ask for the newest scalars, with monitor.listeners=[prometheus]; "
        "whoever reaches it can read them",
    )
    prometheus_port: int = option(9400, "port of monitor.prometheus_address", gt=0, le=65535)
