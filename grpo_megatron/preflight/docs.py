"""Generator of docs/config.md, the reference of all configuration keys."""

from omegaconf import MISSING

from grpo_megatron.config.keys import (
    default_of,
    is_internal,
    is_section,
    known_keys,
    type_name,
    unit_of,
    value_text,
)
from grpo_megatron.preflight.keys import choices, limits

COMMAND = "grpo-megatron config docs > docs/config.md"

_HEAD = f"""# Configuration keys

[All pages](index.md)

Generated from grpo_megatron/config/schema.py by `{COMMAND}`; not edited by hand.

`grpo-megatron config explain KEY` adds what a key interacts with and the rules about it. Every number must be
finite. A key is set in a YAML file (`rollout: {{n: 8}}`) or as an argument (`rollout.n=8`), which wins.
"""


def markdown() -> str:
    """Return the text of docs/config.md: a table of all configuration keys except internal ones.

    The text has no newline at its end.
    """
    known = {key: field for key, field in known_keys().items() if not is_internal(field)}
    parts = [_HEAD]
    for section, field in known.items():
        if is_section(field):
            parts.append(f"## {section}\n\n{field.description}\n")
            parts.append("| key | meaning | type | default |\n|---|---|---|---|")
            parts += [
                _row(key) for key in known if key.rpartition(".")[0] == section and not is_section(known[key])
            ]
            parts.append("")
    return "\n".join(parts).rstrip("\n")


def _row(key: str) -> str:
    field = known_keys()[key]
    kind = type_name(field)
    named = choices(key)
    if named and not kind.startswith("one of"):
        kind = kind.replace("text", f"one of {', '.join(named)}")
    kind = "; ".join(filter(None, [kind, limits(key)]))
    default = default_of(field)
    text = "must be set" if default == MISSING else f"`{value_text(default)}`"
    unit = f" {unit_of(field)}" if unit_of(field) else ""
    return f"| `{key}` | {_cell(field.description)} | {_cell(kind)} | {_cell(text)}{unit} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
