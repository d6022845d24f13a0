"""Replacement for Ray where it is not installed, so that modules that mention it can be imported.

Every name is an exception class, and `ray.remote` leaves classes and functions as they are. Calls that need
Ray fail.
"""

import importlib.abc
import importlib.machinery
import sys
import types


def _name(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Exception,), {})


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that creates `ray.*` modules, in which every name exists."""

    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("ray.") else None
        )

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _name
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Submodules())


def remote(*given, **_options):
    return given[0] if given else lambda decorated: decorated


def is_initialized() -> bool:
    return False


def __getattr__(name: str):
    return importlib.import_module(f"ray.{name}") if name in ("actor", "exceptions", "util") else _name(name)
