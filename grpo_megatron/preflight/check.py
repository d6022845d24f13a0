"""`grpo-megatron config check`: everything that can be known to be wrong before a run starts."""

import dataclasses
from functools import partial
from pathlib import Path

from omegaconf import MISSING, DictConfig, OmegaConf

from grpo_megatron.config.load import as_config, layers, merge, missing_keys
from grpo_megatron.config.origins import leaves
from grpo_megatron.config.schema import Config
from grpo_megatron.data.records import HUB_PREFIX
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.cluster_rules import known_capabilities
from grpo_megatron.preflight.rules import violations


@dataclasses.dataclass
class Report:
    """violations: each one sentence. checked, not_checked: what was looked at, and what could not be, with the reason."""

    violations: list[str] = dataclasses.field(default_factory=list)
    checked: list[str] = dataclasses.field(default_factory=list)
    not_checked: list[str] = dataclasses.field(default_factory=list)

    def attempt(self, what: str, check) -> bool:
        """Run a check that raises UserError; True if it passed."""
        try:
            check()
        except UserError as error:
            self.violations.append(str(error))
            return False
        self.checked.append(what)
        return True

    def text(self) -> str:
        lines = [f"checked: {'; '.join(self.checked)}"] if self.checked else []
        lines += [f"not checked: {what}" for what in self.not_checked]
        if self.violations:
            lines += [f"{len(self.violations)} violations:", *(f"  - {rule}" for rule in self.violations)]
        else:
            lines.append("no violations")
        return "\n".join(lines)


def check(path: str | None, overrides: list[str], command: str = "train") -> Report:
    """command: train or sft. Raises UserError only for a file or an argument that cannot be read at all."""
    report = Report()
    settings, problems = _legal_part(layers(path, overrides))
    report.violations += problems
    report.checked.append("schema")
    config = as_config(merge(settings))
    missing = missing_keys(config, command)
    if missing:
        report.violations.append(f"no value for {', '.join(missing)}; set it in the YAML file or as key=value")
    report.violations += violations(config, command)
    report.checked.append("rules across keys")
    if known_capabilities(config.cluster).gpus is None:
        report.not_checked.append("what the cluster can do: set cluster.gpu, cluster.nodes and cluster.gpus_per_node")
    model_is_here = _check_model(config, report)
    _check_data(config, command, model_is_here, report)
    _check_paths(config, command, report)
    return report


def _legal_part(settings: list[tuple[str, DictConfig]]) -> tuple[list[tuple[str, DictConfig]], list[str]]:
    """The settings without the keys and values the schema refuses, and a sentence for each of those."""
    legal, problems = [], []
    for source, layer in settings:
        for names, value in leaves(OmegaConf.to_container(layer, resolve=False)):
            for name in reversed(names):
                value = {name: value}
            one = OmegaConf.create(value)
            try:
                merge([(source, one)])
                legal.append((source, one))
            except UserError as error:
                problems.append(str(error))
    return legal, problems


def _check_model(config: Config, report: Report) -> bool:
    path = config.model.path
    if path in (None, "", MISSING):
        return False
    if not Path(path).is_dir():
        report.not_checked.append(f"model.path: {path} is not a folder here (layout, lengths, weights, tokenizer)")
        return False
    if config.ref.path and not Path(config.ref.path).is_dir():
        report.not_checked.append(f"ref.path: {config.ref.path} is not a folder here")
        config = dataclasses.replace(config, ref=dataclasses.replace(config.ref, path=None))
    from grpo_megatron.preflight.model import check_model

    return report.attempt(f"model {path}", lambda: check_model(config))


def _check_data(config: Config, command: str, model_is_here: bool, report: Report) -> None:
    from grpo_megatron.data import PromptTokenizer, as_list, load_prompts, read_records

    data = config.data
    tokenizers: list[PromptTokenizer] = []
    if model_is_here:
        report.attempt("tokenizer", lambda: tokenizers.append(PromptTokenizer(config.model.path, data)))
    sources = [("data.train", source) for source in as_list(data.train) if command == "sft" or not config.rollout.replay]
    if command == "train":
        sources += [("data.eval", source) for source in as_list(data.eval)]
    answer = data.response_key if command == "sft" else data.answer_key
    for key, source in sources:
        if source.startswith(HUB_PREFIX):
            report.not_checked.append(f"{key}: {source} is read from a hub")
        elif not Path(source).is_file():
            report.not_checked.append(f"{key}: {source} is not a file here")
        elif not tokenizers:
            report.attempt(f"fields of {key} {source}", partial(read_records, source, [data.prompt_key, answer]))
        elif command == "sft":
            from grpo_megatron.data.examples import load_examples

            one = dataclasses.replace(config, data=dataclasses.replace(data, train=source))
            report.attempt(f"{key} {source}", partial(load_examples, one, *tokenizers))
        else:
            report.attempt(f"{key} {source}", partial(load_prompts, source, *tokenizers, data))


def _check_paths(config: Config, command: str, report: Report) -> None:
    from grpo_megatron.rewards import resolve_reward
    from grpo_megatron.rollout.record import Replay
    from grpo_megatron.run.checkpoints import read_state

    if config.run.resume and not Path(config.run.resume).is_dir():
        report.not_checked.append(f"run.resume: {config.run.resume} is not a folder here")
    elif config.run.resume:
        report.attempt(f"run.resume {config.run.resume}", partial(read_state, config.run.resume))
    if command != "train":
        return
    if not config.rollout.replay:
        report.attempt(f"reward.function {config.reward.function}", partial(resolve_reward, config.reward))
    elif not Path(config.rollout.replay).is_file():
        report.not_checked.append(f"rollout.replay: {config.rollout.replay} is not a file here")
    else:
        report.attempt(f"rollout.replay {config.rollout.replay}", partial(Replay, config.rollout.replay))
