"""Reward models of which nothing is there but what they are."""

import json
from pathlib import Path


def scored_by(folder: Path, like: str = "qwen3-0.6b", **changes) -> list[str]:
    """Arguments with which such a model gives the reward. like: of configs/models. changes: of its config.json."""
    config = json.loads(Path(f"configs/models/{like}/config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "reward"}, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return ["reward.function=model", f"reward.model.path={folder}"]
