"""Where in a YAML file each key stands."""

import yaml

from grpo_megatron.errors import UserError


def key_lines(text: str, path: str) -> dict[str, int]:
    """{dotted key: its line, from 1} of valid YAML. Raises UserError for a key that is set twice.

    YAML parsers keep the last of two equal keys without a word, and a run would follow the wrong one.
    """
    lines: dict[str, int] = {}
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        _walk(root, "", path, lines)
    return lines


def _walk(node: yaml.MappingNode, prefix: str, path: str, lines: dict[str, int]) -> None:
    for name, value in node.value:
        key, line = f"{prefix}{name.value}", name.start_mark.line + 1
        if key in lines:
            raise UserError(f"{path}:{line}: {key} is already set in line {lines[key]}")
        lines[key] = line
        if isinstance(value, yaml.MappingNode):
            _walk(value, f"{key}.", path, lines)
