"""Unpack wheels without installing them, so that their Python code can be read or imported.

    python tools/unpack_wheels.py LIST FOLDER [-- pip's arguments]

LIST has lines NAME==VERSION. Each wheel is unpacked to FOLDER/NAME-VERSION, unless that exists. A wheel that
cannot be downloaded is reported and left out; tests that need it are skipped with a message.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


class NotDownloadedError(Exception):
    """Raised if pip cannot download a package. The message is the last line of pip's error output."""


def download(requirement: str, folder: Path, pip_arguments: list[str]) -> Path:
    """Download the wheel of NAME==VERSION with pip into an empty folder and return the wheel's path.

    Raises NotDownloadedError if pip fails.
    """
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(folder),
    ]
    done = subprocess.run([*pip, *pip_arguments, requirement], capture_output=True, text=True)
    if done.returncode:
        raise NotDownloadedError((done.stderr.strip().splitlines() or ["pip printed no error"])[-1])
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(requirement: str, target: Path, pip_arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as aside:
        try:
            wheel = download(requirement, Path(aside), pip_arguments)
        except NotDownloadedError as error:
            print(
                f"{requirement} is left out of {target.parent}, so tests that need it are skipped: {error}",
                file=sys.stderr,
            )
            return
        content = Path(aside) / "content"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(content)
        content.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("list", type=Path, metavar="LIST", help="file with lines NAME==VERSION")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to unpack the wheels to")
    parser.add_argument("pip", nargs="*", metavar="pip's arguments", help="arguments for pip, after --")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for line in options.list.read_text(encoding="utf-8").splitlines():
        requirement = line.split("#")[0].strip()
        target = options.folder / requirement.replace("==", "-")
        if requirement and not target.exists():
            unpack(requirement, target, options.pip)


if __name__ == "__main__":
    main()
