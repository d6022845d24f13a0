"""Import hook that changes modules of Megatron (and TransformerEngine) while they are imported.

With it, this project can patch Megatron without holding a modified copy. `patches` and `emulation` register
their changes here. One finder in ``sys.meta_path`` keeps all of them.
"""

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Changes:
    """Changes that the import hook makes to modules while they are imported.

    rewriters: {prefix of module names: ast.NodeTransformer class that rewrites the source of these modules}.
    names: {name: value} of global variables that are added to the rewritten modules.
    mend: {module name: functions to call with this module right after it is loaded, which patch it}.
    """

    rewriters: dict[str, type[ast.NodeTransformer]] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    mend: dict[str, list[Callable]] = field(default_factory=dict)

    def rewriter(self, module: str) -> type[ast.NodeTransformer] | None:
        return next(
            (rewriter for start, rewriter in self.rewriters.items() if module.startswith(start)), None
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, changes: Changes):
        super().__init__(name, path)
        self._changes = changes

    def get_code(self, fullname):
        source, rewriter = self.get_data(self.path), self._changes.rewriter(fullname)
        if rewriter is None or b"cuda" not in source:
            return super().get_code(fullname)
        tree = ast.fix_missing_locations(rewriter().visit(ast.parse(source, self.path)))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module):
        if self._changes.rewriter(module.__name__):
            module.__dict__.update(self._changes.names)
        super().exec_module(module)
        for mend in self._changes.mend.get(module.__name__, ()):
            mend(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.changes = Changes()

    def find_spec(self, fullname, path, target=None):
        if self.changes.rewriter(fullname) is None and fullname not in self.changes.mend:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self.changes)
        return spec


def changes() -> Changes:
    """Return the Changes that this process's import hook makes to modules. The first call installs the hook.

    Callers add their changes to the returned object. A change has no effect on modules that were imported
    before it was added.
    """
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder.changes
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return finder.changes
