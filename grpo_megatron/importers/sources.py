"""Reader of a configuration of verl or RLinf: a launch script, Hydra's overrides.yaml, or YAML.

The YAML may be a configuration file, or what a launch command prints with --cfg job.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_megatron.errors import UserError
from grpo_megatron.importers.hydra_values import as_words
from grpo_megatron.importers.launch_command import is_argument, read_arguments
from grpo_megatron.importers.launch_reader import read_launch
from grpo_megatron.importers.settings import Settings

_KEEP_UNREAD = re.compile(r"\$\{oc\.env:")


def read_settings(
    text: str, launch: int | None = None, is_yaml: bool = False, environment: dict[str, str] | None = None
) -> Settings:
    """Return the settings in a launch script or a YAML file of verl or RLinf.

    text: content of the file. The YAML may be a configuration, or Hydra's list of `key=value` arguments.
    launch: number of the script's launch command to import, counted from 1. None: all launch commands must
        have the same settings.
    is_yaml: True to accept nothing but YAML.
    environment: {name: value} of the variables that are set when the script starts.

    Raises UserError in these cases: the text is neither a launch script nor YAML, the script cannot be run in
    the sandbox, the script has no launch command of this number, or `launch` is None and the settings of the
    launch commands differ.
    """
    try:
        tree = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        if is_yaml:
            why = " ".join(str(error).split()) or "nested too deeply"
            raise UserError(f"the input is not valid YAML; correct it: {why}") from error
        tree = None
    if isinstance(tree, list) and tree and all(map(is_argument, tree)):
        return read_arguments(tree)
    if isinstance(tree, dict) and (is_yaml or any(isinstance(value, dict) for value in tree.values())):
        return _read_tree(tree)
    if is_yaml:
        raise UserError(
            f"the top level must be YAML sections, but is a {type(tree).__name__}; give a whole configuration"
        )
    return read_launch(text, launch, environment or {})


def read_hydra_folder(folder: Path) -> Settings:
    """Return the settings that Hydra has written into the folder of a run.

    folder: output folder of the run, or its subfolder .hydra.

    Raises UserError if there is no overrides.yaml, or if overrides.yaml or hydra.yaml is not valid YAML.
    Raises OSError or UnicodeDecodeError if one of these files cannot be read.
    """
    found = next((one for one in (folder, folder / ".hydra") if (one / "overrides.yaml").is_file()), None)
    if found is None:
        raise UserError("the folder contains no .hydra/overrides.yaml; give the output folder of a Hydra run")
    settings = read_settings((found / "overrides.yaml").read_text(encoding="utf-8"), is_yaml=True)
    if (found / "hydra.yaml").is_file():
        run = read_settings((found / "hydra.yaml").read_text(encoding="utf-8"), is_yaml=True).values
        settings.program = run.get("hydra.job.name")
        settings.base = {"name": str(run["hydra.job.config_name"])} if "hydra.job.config_name" in run else {}
    return settings


# YAML


class _Loader(yaml.SafeLoader):
    """A YAML loader that keeps dates as text, because no setting of a training run is a date."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


def _read_tree(tree: dict) -> Settings:
    try:
        values = dict(_flat(_resolved(tree)))
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"this YAML cannot be read: {' '.join(str(error).split())}") from error
    return Settings({key: as_words(value) for key, value in values.items()})


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _resolved(tree: dict) -> dict:
    """Return the tree of a YAML file, with each reference ${key} replaced by the value of the key.

    References to environment variables, and references that cannot be resolved, stay as they are.
    """
    with _arithmetic():
        config = OmegaConf.create(tree)
        return _resolve_node(config, OmegaConf.to_container(config, resolve=False), ())


def _resolve_node(config, raw: Any, path: tuple) -> Any:
    if isinstance(raw, dict):
        return {name: _resolve_node(config, value, (*path, name)) for name, value in raw.items()}
    if isinstance(raw, list):
        return [_resolve_node(config, value, (*path, index)) for index, value in enumerate(raw)]
    if not isinstance(raw, str) or "${" not in raw or _KEEP_UNREAD.search(raw):
        return raw
    node = config
    try:
        for name in path:
            node = node[name]
    except OmegaConfBaseException:
        return raw
    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node


@contextmanager
def _arithmetic() -> Iterator[None]:
    """Register the OmegaConf resolvers that RLinf's files use, such as ${multiply:a,b}, for a `with` block.

    OmegaConf's registry is global, so the resolvers are removed when the block ends.
    """
    resolvers = {
        "add": lambda *numbers: sum(numbers),
        "subtract": lambda a, b: a - b,
        "multiply": lambda a, b: a * b,
        "divide": lambda a, b: a / b,
        "int_div": lambda a, b: a // b,
        "not": lambda value: not value,
    }
    added = [name for name in resolvers if not OmegaConf.has_resolver(name)]
    with warnings.catch_warnings():
        # omegaconf renamed this method; some versions warn about the old name.
        warnings.simplefilter("ignore", UserWarning)
        for name in added:
            OmegaConf.register_new_resolver(name, resolvers[name])
    try:
        yield
    finally:
        for name in added:
            OmegaConf.clear_resolver(name)
