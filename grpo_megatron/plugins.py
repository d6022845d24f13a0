"""Lookup of functions by name: built in, registered by a decorator, or `module:attribute`."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from grpo_megatron.errors import UserError, described, shortened


@dataclass(frozen=True)
class Call:
    """Description of how this project calls the plugin functions of one kind, such as reward functions.

    positional: names of the arguments that are passed by position
    keywords: names of the arguments that are passed by keyword
    may_be_async: True if the caller awaits the results of async functions
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    may_be_async: bool = False

    def problem(self, function: Callable) -> str | None:
        """Return the reason why `function` cannot be called in this way, as text; None if it can.

        The text continues a sentence that names the function. A function without a readable signature, such
        as some functions written in C, is accepted.
        """
        if not self.may_be_async and is_async(function):
            return "must be a normal function, not an async one, because its result is not awaited"
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return None
        try:
            signature.bind(*self.positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            bare = [
                parameter.replace(annotation=inspect.Parameter.empty)
                for parameter in signature.parameters.values()
            ]
            own = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
            arguments = ", ".join([*self.positional, *(f"{name}=..." for name in self.keywords)])
            return (
                f"is called with ({arguments}), but its signature {shortened(str(own), 200)} does not accept "
                f"these arguments: {error}"
            )
        return None


def is_async(function: Callable) -> bool:
    """Return whether a function, or an object with `__call__`, is async: its result must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Registry:
    """Plugin functions of one kind by name, such as all reward functions.

    The decorator `@registry("name")` adds a function and returns it unchanged. It raises ValueError if
    another function has this name.

    kind: word for such a function in error messages, such as `reward`
    key: the configuration key that selects a function, for error messages
    built_in: names that the key accepts although they are not registered here; they are listed in error
        messages
    call: the arguments that the functions must accept; None: any arguments
    """

    def __init__(self, kind: str, key: str, built_in: tuple[str, ...] = (), call: Call | None = None):
        self.kind, self.key, self._built_in, self._call = kind, key, built_in, call
        self._known: dict[str, Callable] = {}

    def __call__(self, name: str) -> Callable[[Callable], Callable]:
        def register(function: Callable) -> Callable:
            known = self._known.get(name)
            # A module that is reloaded registers the same function again.
            if known is not None and (known.__module__, known.__qualname__) != (
                function.__module__,
                function.__qualname__,
            ):
                raise ValueError(
                    f"{self.kind} {name!r} is registered twice, by {known.__module__} and by "
                    f"{function.__module__}; rename one of them"
                )
            self._known[name] = function
            return function

        return register

    @property
    def names(self) -> list[str]:
        return list(self._known)

    def get(self, name: str) -> Callable:
        """Return the function with this name. Import the function's module if the name contains one.

        Raises UserError if the function does not exist, or if a function given as `module:name` does not
        accept the arguments that the Registry's `call` states.

        name: a registered name, or `module:name` for an attribute of the module or a function that the module
            registers. The working directory is also searched for the module.
        """
        module_name, separator, attribute = name.partition(":")
        if not separator:
            if name in self._known:
                return self._known[name]
            known = ", ".join([*self._built_in, *self.names, "module:attribute"])
            raise UserError(f"{self.key}={name} is unknown; choose one of {known}")
        module = import_module(module_name, f"{self.key}={name}")
        function = getattr(module, attribute, None) or self._known.get(attribute)
        if not callable(function):
            raise UserError(
                f"{self.key}={name}: {module_name} has no function {attribute} and registers none under "
                "that name"
            )
        problem = self._call and self._call.problem(function)
        if problem:
            raise UserError(
                f"{self.key}={name}: the {self.kind} {problem} (docs/plugins.md shows an example)"
            )
        return function

    def problems(self, name: str) -> list[str]:
        """Return the message of the error that `get` raises for `name`, in a list; empty without an error.

        Checks of the configuration use this method, because they collect all messages before they raise.
        """
        try:
            self.get(name)
        except UserError as error:
            return [str(error)]
        return []


def import_module(name: str, setting: str):
    """Import a module of the user, and return the module. Add the working directory to sys.path first.

    Raises UserError if the import fails, whatever exception the module's code raises.

    name: dotted name of the module.
    setting: `key=value` in the configuration that names the module, for error messages.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{setting} cannot be imported: {shortened(repr(name))} is not a module name")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{setting} cannot be imported: {error}; check the name, and that the module is installed or in "
            "the working directory"
        ) from error
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        raise UserError(f"{setting} cannot be imported: {described(error)} ({place})") from error
