"""Short forms of settings: a plain value in place of a section, such as rollout.agent=module:function."""

from typing import Any

from grpo_megatron.config.keys import default_of, known_keys, short_key


def spell_out(values: dict[str, Any], lines: dict[str, int]) -> None:
    """Replace the plain value of a section by a value of the key that it is short for. null unsets its keys.

    Sections without a short form are left alone.

    values: nested settings of one source, which are changed.
    lines: {dotted key: line in the file}, which gets the lines of the keys.
    """
    for key, field in known_keys().items():
        name = short_key(field)
        *above, last = key.split(".")
        parent: Any = values
        for part in above:
            parent = parent.get(part) if isinstance(parent, dict) else None
        if name is None or not isinstance(parent, dict) or last not in parent:
            continue
        value = parent[last]
        if isinstance(value, dict):
            continue
        names = known_keys(field.annotation)
        parent[last] = (
            {name: value}
            if value is not None
            else {other: default_of(declared) for other, declared in names.items()}
        )
        if key in lines:
            lines.update({f"{key}.{other}": lines[key] for other in parent[last]})
