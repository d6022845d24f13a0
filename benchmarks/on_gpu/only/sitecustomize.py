"""Hide packages in a dry run of the pack: those that neither the machine's image nor the pack has.

The file that GRPO_PACK_PACKAGES names has the names of the visible packages. Packages that these require stay
visible too.
"""

import importlib.abc
import importlib.machinery
import os
import re
import sys
import sysconfig
from importlib import metadata


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _with_dependencies(names: set[str]) -> set[str]:
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        # SGLang requires far more packages than it imports. The pack lists the necessary ones by name.
        if name == "sglang":
            continue
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [_key(re.match(r"[\w.-]+", line)[0]) for line in required if "extra ==" not in line]
    return found


def _is_installed(module: str) -> bool:
    """Return True if the module is in this interpreter's site-packages.

    A module of the same name may also belong to this project or be a stub.
    """
    found = importlib.machinery.PathFinder.find_spec(module)
    return bool(found and found.origin and found.origin.startswith(sysconfig.get_path("purelib")))


class _Missing(importlib.abc.MetaPathFinder):
    """Import hook that hides the modules of packages that are not in the list."""

    def __init__(self, packages: set[str]):
        self._hidden = {
            module
            for module, owners in metadata.packages_distributions().items()
            if not packages & set(map(_key, owners))
        }

    def find_spec(self, name, path=None, target=None):
        if path is None and name in self._hidden and _is_installed(name):
            raise ModuleNotFoundError(
                f"No module named {name!r} in the pack or in the image it is made for", name=name
            )
        return None


if "GRPO_PACK_PACKAGES" in os.environ:
    with open(os.environ["GRPO_PACK_PACKAGES"], encoding="utf-8") as file:
        sys.meta_path.insert(0, _Missing(_with_dependencies({"pip", *file.read().split()})))
