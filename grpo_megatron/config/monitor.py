"""The section `monitor` of the configuration."""

from typing import Literal

from grpo_megatron.config.options import FilledText, dataclass, option

# Services that scalars can be sent to, besides the run's folder. monitoring.optional implements them.
LISTENERS = ("wandb", "prometheus")


@dataclass
class MonitorConfig:
    samples_every: int = option(
        10, "Interval at which some groups of a step are shown as text. 0: never.", "steps", ge=0
    )
    sample_groups: int = option(2, "Number of groups that are shown of a step.", gt=0)
    sample_characters: int = option(
        4000,
        "Number of characters that are shown of a prompt or a response. The middle of a longer text is left "
        "out.",
        "characters",
        ge=100,
    )
    histograms_every: int = option(
        1,
        "Interval at which histograms of rewards, response lengths and advantages are made. 0: never.",
        "steps",
        ge=0,
    )
    timeline_mib: int = option(
        64,
        "Size at which timeline.json is renamed to timeline.previous.json, and a new file begins.",
        "MiB",
        gt=0,
    )
    listeners: list[Literal[LISTENERS]] = option(
        [],
        "Services that scalars are sent to, besides the run's folder: wandb (Weights & Biases), prometheus.",
    )
    wandb_project: FilledText = option(
        "grpo-megatron", "Project of the run in Weights & Biases, with monitor.listeners=[wandb]."
    )
    prometheus_address: FilledText = option(
        "127.0.0.1",
        "Address at which Prometheus can fetch the newest scalars, with monitor.listeners=[prometheus]. "
        "Anyone who can connect to this address can read the scalars.",
    )
    prometheus_port: int = option(9400, "Port of monitor.prometheus_address.", gt=0, le=65535)
