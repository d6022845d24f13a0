"""The section `monitor` of the configuration."""

from typing import Literal

from grpo_megatron.config.options import FilledText, dataclass, option

# Services that scalars can be sent to, besides the run's folder. monitoring.optional implements them.
LISTENERS = ("wandb", "prometheus")


@dataclass
class MonitorConfig:
    samples_every: int = option(10, "Interval at which samples are shown as text. 0: never.", "steps", ge=0)
    sample_groups: int = option(2, "Groups that are shown.", gt=0)
    sample_characters: int = option(
        4000,
        "Characters shown of a text. The middle of longer ones is left out.",
        "characters",
        ge=100,
    )
    histograms_every: int = option(
        1,
        "Interval of histograms of rewards, response lengths and advantages. 0: never.",
        "steps",
        ge=0,
    )
    timeline_mib: int = option(
        64,
        "Size at which timeline.json becomes timeline.previous.json, and a new file begins.",
        "MiB",
        gt=0,
    )
    listeners: list[Literal[LISTENERS]] = option(
        [],
        "Services that get the scalars, besides the run's folder.",
    )
    wandb_project: FilledText = option("grpo-megatron", "Project in Weights & Biases.")
    prometheus_address: FilledText = option(
        "127.0.0.1",
        "Address at which Prometheus, and anyone who can connect, can read the scalars.",
    )
    prometheus_port: int = option(9400, "Port of monitor.prometheus_address.", gt=0, le=65535)
