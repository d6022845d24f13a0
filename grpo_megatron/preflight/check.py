"""Checks of a configuration before a run starts. `config check` reports all errors at once."""

import dataclasses
import os
from collections.abc import Callable
from functools import partial

from omegaconf import MISSING

from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import scores_on_ranks
from grpo_megatron.config.load import ResolvedConfig, missing_values, must_be_legal, resolve
from grpo_megatron.config.schema import Config
from grpo_megatron.data.records import HUB_PREFIX, hub_folder
from grpo_megatron.errors import UserError
from grpo_megatron.model.gguf_advice import gguf_advice
from grpo_megatron.paths import file_problem, folder_problem, is_absent
from grpo_megatron.preflight.cluster_rules import known_capabilities, runs_here
from grpo_megatron.preflight.output_folders import (
    check_output_folders,
    is_of_another_machine,
    must_be_writable,
    output_folders,
)
from grpo_megatron.preflight.rules import violations


@dataclasses.dataclass
class Report:
    """Result of checking a configuration: its errors, the passed checks, and what could not be checked.

    `grpo-megatron config check` prints this result.

    violations: one sentence for each error that was found.
    checked: names of the checks that were passed, such as `tokenizer`. The checks `schema` and `rules across
        keys` are always listed, even if they found errors.
    not_checked: one text for each thing that could not be checked on this machine, with the reason.
    """

    violations: list[str] = dataclasses.field(default_factory=list)
    checked: list[str] = dataclasses.field(default_factory=list)
    not_checked: list[str] = dataclasses.field(default_factory=list)

    def attempt(self, what: str, check) -> bool:
        """Run one check, and record its result in this report. Return True if the check passed.

        what: name of the check, which is added to `checked` if the check passes.
        check: function without arguments that raises UserError if the check fails. The error's message is
            added to `violations`.
        """
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
            count = len(self.violations)
            lines += [
                f"{count} violation{'s' if count > 1 else ''}:",
                *(f"  - {rule}" for rule in self.violations),
            ]
        else:
            lines.append("no violations")
        return "\n".join(lines)


def load_config(path: str | None, overrides: list[str], command: Command = Command.train) -> Config:
    """Load the configuration for a command from a file and arguments, and check it against all rules.

    The files of the model and the data are not examined, and no Ray cluster is asked about its machines
    (`check_start` and `check` examine more).

    path: YAML file. None: no file.
    overrides: arguments of the form key=value, which override the file.
    command: the command that will run. Rules for other commands are skipped.

    Raises UserError if the file or an argument cannot be read, or if there are errors. The message lists all
    values that the schema refuses, all missing values and all broken rules.
    """
    settings = resolve(path, overrides)
    must_be_legal(_problems(settings, command))
    return settings.config


def _problems(settings: ResolvedConfig, command: Command) -> list[str]:
    """Return one sentence for each error of a configuration.

    Errors are values that the schema refuses, required keys without a value, and broken rules.

    settings: the configuration, with the values that the schema refused.
    command: the command that will run. Rules for other commands are skipped.
    """
    return [
        *settings.refused.values(),
        *missing_values(settings.config, command),
        *violations(settings.config, command, refused=frozenset(settings.refused)),
    ]


def check_start(config: Config, command: Command) -> None:
    """Check packages, model, output folders and machines, before a run starts its first process.

    The packages are SGLang, for `train` and `serve`, and those of monitoring services such as Weights &
    Biases. If cluster.ray_address is set, this process joins that Ray cluster to examine its machines.

    command: the command that will run.

    Raises UserError as soon as one of these checks fails.
    """
    from grpo_megatron.monitoring.optional import check_listeners
    from grpo_megatron.preflight.cluster import check_cluster
    from grpo_megatron.preflight.model import check_model
    from grpo_megatron.sglang.release import check_release

    check_listeners(config)
    if command.syncs:
        check_release(config.rollout)
    check_model(config, command)
    check_output_folders(config, command)
    check_cluster(config, command)


def check(path: str | None, overrides: list[str], command: Command = Command.train) -> Report:
    """Check a configuration, and the models, data and folders that it names. Return a report with all errors.

    Files and folders that are not on this machine cannot be checked; the report lists them.

    path: YAML file. None: no file.
    overrides: arguments of the form key=value, which override the file.
    command: the command that the configuration is for.

    Raises UserError only if the file or an argument cannot be read, or if algorithm.preset names an unknown
    preset.
    """
    settings = resolve(path, overrides)
    config, report = settings.config, Report(_problems(settings, command))
    report.checked += ["schema", "rules across keys"]
    if known_capabilities(config).gpus is None:
        report.not_checked.append(
            "capabilities of the cluster; to check them, set cluster.gpu, cluster.nodes and "
            "cluster.gpus_per_node"
        )
    model_is_here = _check_model(config, command, report)
    _check_data(config, command, model_is_here, report)
    _check_paths(config, command, report)
    # Some rules are checked twice, with and without the model.
    report.violations = list(dict.fromkeys(report.violations))
    return report


def _check_model(config: Config, command: Command, report: Report) -> bool:
    """Check the model, the reference model and the reward model, and record the results in `report`.

    A model is not checked if its folder is not on this machine. The reference model and the reward model are
    checked only for `train`, because no other command uses them.

    Returns True if the architecture of the model in model.path could be read, even if the model has errors.
    The model's tokenizer can then be used to check the data.
    """
    path, ref = config.model.path, config.ref.path if command.syncs else None
    if ref and is_absent(ref):
        report.not_checked.append(f"ref.path: {ref} is not a folder here")
        config = dataclasses.replace(config, ref=dataclasses.replace(config.ref, path=None))
    elif ref and folder_problem(ref):
        report.violations.append(f"ref.path: {ref} {gguf_advice(ref) or folder_problem(ref)}")
        config = dataclasses.replace(config, ref=dataclasses.replace(config.ref, path=None))
    if command == Command.train and scores_on_ranks(config):
        config = _check_reward_model(config, report)
    if path in (None, "", MISSING):
        return False
    if is_absent(path):
        report.not_checked.append(
            f"model.path: {path} is not a folder here (layout, lengths, weights, tokenizer)"
        )
        return False
    from grpo_megatron.model.families import read_architecture
    from grpo_megatron.preflight.model import model_violations

    try:
        arch = read_architecture(path)
    except UserError as error:
        report.violations.append(str(error))
        return False
    found = model_violations(config, arch, command)
    report.violations += found
    if not found:
        report.checked.append(f"model {path}")
    return True


def _check_reward_model(config: Config, report: Report) -> Config:
    """Check that the tokenizer of the reward model can be used, and record the result in `report`.

    The tokenizer is not checked if the reward model or the model in model.path is not on this machine.

    Returns the configuration for later checks. If the reward model is not on this machine, reward.model.path
    is None in the returned configuration, so that later checks do not read it.
    """
    path = config.reward.model.path
    if path is None or is_absent(path):
        if path:
            report.not_checked.append(f"reward.model.path: {path} is not a folder here")
        reward = dataclasses.replace(config.reward, model=dataclasses.replace(config.reward.model, path=None))
        return dataclasses.replace(config, reward=reward)
    from grpo_megatron.data.conversations import conversations_of

    what, policy = f"tokenizer of reward.model.path {path}", config.model.path
    if policy in (None, "", MISSING) or is_absent(policy):
        report.not_checked.append(
            f"{what}: the check compares it with the tokenizer of model.path, which is not a folder here"
        )
    else:
        report.attempt(what, partial(conversations_of, path, policy, config.data))
    return config


def _check_data(config: Config, command: Command, model_is_here: bool, report: Report) -> None:
    from grpo_megatron.data import PromptTokenizer, as_list, read_records
    from grpo_megatron.rollout.environments import offered_tools

    data = config.data
    tokenizers: list[PromptTokenizer] = []
    if model_is_here:
        tools = (
            list if command == Command.reward_model else partial(offered_tools, config.rollout, config.reward)
        )
        report.attempt(
            "tokenizer", lambda: tokenizers.append(PromptTokenizer(config.model.path, data, tools()))
        )
    trained = not command.generates or (command == Command.train and not config.rollout.replay)
    named = [("data.train", data.train)] if trained else []
    if command != Command.sft:
        named.append(("data.eval", data.eval))
    # Values that are neither a name nor a list of names are left out, because a rule reports them.
    sources = [
        (key, source) for key, value in named if isinstance(value, (str, list)) for source in as_list(value)
    ]
    of_command = {
        Command.sft: [data.prompt_key, data.response_key],
        Command.reward_model: [data.chosen_key, data.rejected_key],
    }
    fields = of_command.get(command, [data.prompt_key, data.answer_key])
    for key, source in sources:
        if not isinstance(source, str):
            continue
        is_hub, folder = source.startswith(HUB_PREFIX), hub_folder(source)
        if is_hub and not folder:
            report.not_checked.append(f"{key}: {source} is read from a hub")
        elif is_absent(folder if is_hub else source):
            report.not_checked.append(f"{key}: {source} is not a {'folder' if is_hub else 'file'} here")
        elif (
            not is_hub and not os.path.isdir(source) and file_problem(source)
        ):  # open_records reports more about folders
            report.violations.append(f"{key}: {source} {file_problem(source)}")
        elif not tokenizers:
            report.attempt(f"fields of {key} {source}", partial(read_records, source, fields))
        elif command == Command.sft:
            from grpo_megatron.data.examples import load_examples

            one = dataclasses.replace(config, data=dataclasses.replace(data, train=source))
            report.attempt(f"{key} {source}", partial(load_examples, one, *tokenizers))
        elif command == Command.reward_model:
            report.attempt(f"{key} {source}", partial(_read_pairs, source, *tokenizers, config))
        else:
            report.attempt(f"{key} {source}", partial(_read_prompts, source, *tokenizers, config))


def _read_prompts(source: str, tokenizer, config: Config) -> None:
    from grpo_megatron.data import load_prompts
    from grpo_megatron.rollout.episodes import record_check

    load_prompts(source, tokenizer, config.data, check=record_check(config))


def _read_pairs(source: str, tokenizer, config: Config) -> None:
    """Check a source of preference pairs by reading all of its pairs.

    source: name of the file or data set.
    tokenizer: a PromptTokenizer. The type is not named in the signature, because importing it is slow.

    Raises UserError if a pair cannot be used.
    """
    from grpo_megatron.data.conversations import Conversations, pad_token
    from grpo_megatron.data.preferences import load_pairs

    conversations = Conversations(tokenizer, pad_token(config.model.path))
    load_pairs(source, conversations, config.data, config.rollout.max_response_length)


def _check_paths(config: Config, command: Command, report: Report) -> None:
    from grpo_megatron.rollout.recording.record import must_be_free
    from grpo_megatron.run.folder import beginning
    from grpo_megatron.run.resume import ANEW, AUTO

    resume, replay, usable = config.run.resume, config.rollout.replay, {}
    for key, folder in output_folders(config, command).items():
        usable[key] = _can_write(key, folder, partial(must_be_writable, key, folder), config, report)
    if command == Command.eval:
        replay = None  # an evaluation ignores rollout.replay, because it always generates with engines
    elif resume not in (AUTO, *ANEW) and is_absent(resume):
        report.not_checked.append(f"run.resume: {resume} is not a folder here")
    elif usable["run.root"] or resume not in (AUTO, *ANEW):
        report.attempt(f"run.resume {resume}", partial(beginning, config, command))
    if command == Command.train and (record := config.rollout.record):
        _can_write("rollout.record", record, partial(must_be_free, record), config, report)
    if command != Command.train or not replay:
        return
    if is_absent(replay):
        report.not_checked.append(f"rollout.replay: {replay} does not exist here")
    else:
        report.attempt(f"rollout.replay {replay}", partial(_open_recording, replay))


def _open_recording(path: str) -> None:
    from grpo_megatron.rollout.recording.replay import Replay

    try:
        Replay(path)
    except UserError as error:
        raise UserError(f"rollout.replay: {error}") from error


def _can_write(
    key: str, path: str, must_be_right: Callable[[], None], config: Config, report: Report
) -> bool:
    """Check that the run can write to a path, and record in `report` if it cannot. Return True if it can.

    If the run is for this machine, a failure is a violation. If the run is for other machines, a failure is
    only listed as not checked, because the path may be usable there. The same holds if not even the first
    folder of the path exists on this machine; `must_be_right` is not called in this case.

    key: configuration key of the path.
    path: the file or folder that the run will write.
    must_be_right: function that raises UserError if the path cannot be used on this machine.
    """
    if is_of_another_machine(path):
        report.not_checked.append(f"{key}: not even the first folder of {path} is on this machine")
        return False
    if runs_here(config):
        return report.attempt(f"{key} {path}", must_be_right)
    try:
        must_be_right()
    except UserError as error:
        report.not_checked.append(f"{key}: on this machine, {error}")
        return False
    return True
