"""Preconditions of an engine that are checked before SGLang starts."""

import sys
import tempfile
from pathlib import Path

import pytest
from torch.distributed import FileStore

from grpo_megatron.sglang.start import meeting_file


@pytest.mark.skipif(sys.platform != "linux", reason="SGLang runs on Linux")
def test_ranks_meet_at_a_file_without_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file, path = meeting_file()
    with file:
        ranks = [FileStore(path, 2) for _ in range(2)]
        ranks[0].set("question", "42")
        assert ranks[1].get("question") == b"42"
        assert list(tmp_path.iterdir()) == []
    assert not Path(path).exists()
