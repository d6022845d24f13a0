"""Reward models that consist only of a config.json."""

import json
from pathlib import Path


def scored_by(folder: Path, like: str = "qwen3-0.6b", **changes) -> list[str]:
    """Return arguments that make such a model give the reward.

    like: model in configs/models.
    changes: changes to its config.json.
    """
    config = json.loads(Path(f"configs/models/{like}/config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "reward"}, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return ["reward.function=model", f"reward.model.path={folder}"]
