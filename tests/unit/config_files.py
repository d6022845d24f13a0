"""Helpers of tests of `grpo-megatron config ...`: run a command, and write its files."""

from grpo_megatron.cli import main


def config(capsys, *arguments, status=0) -> str:
    """Run `grpo-megatron config ARGUMENTS` and return what it printed, to standard output and error."""
    assert main(["config", *map(str, arguments)]) == status
    out, err = capsys.readouterr()
    return out + err


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path
