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
        """Return the reason why `function` does not accept the call that `self` describes; None if it does.

        An async function is also a problem, unless `may_be_async` is True. A function without a readable
        signature, such as some functions written in C, is accepted. The result continues a sentence that
        begins with the function's name, such as `is called with (a, b), but ...`.
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
    """Return True if a function, or the `__call__` of an object, is async: its result must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Registry:
    """Table of the plugin functions of one kind by name, such as of all reward functions.

    The decorator `@registry("name")` adds a function and returns it unchanged. It raises ValueError if
    another function has this name.

    kind: word for such a function in error messages, such as `reward`
    key: the configuration key that selects a function, for error messages
    built_in: further names that the key accepts although the table lacks them, for error messages
    call: the arguments that a function given as `module:name` must accept; None: any arguments
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

        name: a registered name, or `module:name` for an attribute of the module or a function that the module
            registers. The working directory is also searched for the module.

        Raises UserError if the function does not exist. For a function given as `module:name`, also raises
        UserError if it does not accept the arguments with which this project calls functions of its kind.
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
        """Return an empty list if the function `name` can be used, else a list with one error message.

        The message is that of the UserError that `get` raises. Checks of the configuration use this method,
        because they collect the messages of all keys before they raise an error.
        """
        try:
            self.get(name)
        except UserError as error:
            return [str(error)]
        return []


def import_module(name: str, setting: str):
    """Import a module that the user's configuration names, and return the module.

    The working directory is added to sys.path before. Raises UserError if the import fails, whatever
    exception the module's code raises.

    name: dotted name of the module.
    setting: the text `key=value` of the configuration that names the module, for error messages.
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
