"""List the pins in requirements/ that have a newer release, and our lines that depend on their release.

    python tools/upstream.py [--package NAME ...] [-- pip's arguments]

pip asks the package index that it is configured with. A line of ours depends on a release if it contains a
release number of three parts, or sets a constant such as _RELEASE. Its package is the one that is named last.
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from lock_gpu import REQUIREMENTS, roots
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = REQUIREMENTS.parent
_WITHOUT_PINS = ("gpu-lock.txt", "gpu-system.txt")
# Three numbers, which are no part of an address or a section of a paper.
_NUMBER = r"(?<!section )(?<![\d.])\d+\.\d+\.\d+(?!\.?\d)"
_CONSTANT = r"^\w*(?:RELEASE|VERSION)\w* = [\"'(]"


def pins() -> dict[str, dict[str, list[str]]]:
    """Return {package: {pinned version: files in requirements/ that pin it}}."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(REQUIREMENTS.glob("*.txt")):
        for requirement in roots(path.name) if path.name not in _WITHOUT_PINS else []:
            (pin,) = requirement.specifier
            found[canonicalize_name(requirement.name)][pin.version].append(path.name)
    return found


def dependents(packages: Iterable[str]) -> dict[str | None, list[str]]:
    """Return {package: our lines that depend on its release, as `FILE:NUMBER: TEXT`}.

    Many packages have names that are ordinary words, so only packages count that some line names right before
    a release number. Lines before which none is named have the key None.
    """
    paths = [*(ROOT / "grpo_megatron").rglob("*.py"), *(ROOT / "tools").glob("*.py"), ROOT / "setup.py"]
    texts = {path.relative_to(ROOT): path.read_text("utf-8") for path in sorted(paths)}
    words = {name: rf"(?<![a-z0-9]){name.replace('-', '[-_.]?')}(?![a-z0-9])" for name in packages}
    # What precedes the release numbers, one number a line.
    numbers = ((text, match.start()) for text in texts.values() for match in re.finditer(_NUMBER, text))
    heads = "\n".join(text[max(0, at - 60) : at].rpartition("\n")[2] for text, at in numbers)
    named = {
        name: re.compile(word, re.I)
        for name, word in words.items()
        if re.search(rf"{word}[-=`'\" ]{{1,4}}$", heads, re.I | re.M)
    }
    found: dict[str | None, list[str]] = defaultdict(list)
    for path, text in texts.items():
        last = None
        for number, line in enumerate(text.splitlines(), 1):
            names = sorted((match.start(), name) for name in named for match in named[name].finditer(line))
            places = [match.start() for match in re.finditer(_NUMBER, line)]
            places += [len(line)] if re.match(_CONSTANT, line) else []
            owners = {max([(-1, last), *(each for each in names if each[0] < at)])[1] for at in places}
            for owner in owners:
                found[owner].append(f"{path}:{number}: {line.strip()}")
            last = names[-1][1] if names else last
    return found


def newest(package: str, versions: Iterable[str], arguments: list[str]) -> tuple[str | None, str]:
    """Return (newest release that pip finds, or None, pip's last message).

    versions: the pinned versions. If one is a pre-release, pip is asked for pre-releases too.
    arguments: further arguments of pip.
    """
    before = ["--pre"] if any(Version(version).is_prerelease for version in versions) else []
    pip = [sys.executable, "-m", "pip", "index", "versions", "--retries", "0", *before, *arguments, package]
    done = subprocess.run(pip, capture_output=True, text=True)
    found = re.match(r"\S+ \((\S+)\)", done.stdout)
    return found and found[1], (done.stderr.strip().splitlines() or ["pip printed no error"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", action="append", help="ask for this pin only; can be repeated")
    parser.add_argument("pip", nargs="*", metavar="pip's arguments", help="arguments for pip, after --")
    given, pinned = parser.parse_args(), pins()
    lines, wanted = dependents(pinned), [canonicalize_name(name) for name in given.package or pinned]
    if unknown := [name for name in wanted if name not in pinned]:
        parser.error(f"requirements/ has no pin of {', '.join(unknown)}")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: newest(name, pinned[name], given.pip), wanted))
    if not any(version for version, _ in answers):
        print(
            f"pip found no release of any pin, such as {wanted[0]}: {answers[0][1]}\nCheck the network and "
            "pip's configuration, or give pip's arguments after `--`, such as `-- --index-url URL`",
            file=sys.stderr,
        )
        return 1
    for name, (version, message) in zip(wanted, answers, strict=True):
        if version is None:
            print(f"{name}: pip found no release: {message}")
        elif any(Version(pin) < Version(version) for pin in pinned[name]):
            ours = ", ".join(f"{pin} ({', '.join(files)})" for pin, files in pinned[name].items())
            print(f"{name}: {ours}; newest: {version}", *lines[name], sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
