"""Import of the user's own objects by `package.module:name`, and calls with the options of the job file."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rudra.errors import ConfigError, meant, unknown

OURS = {"rudra", "protocols", "topologies"}
"""Module names that the user's own modules must not have."""

CALLABLE = "package.module:callable"
"""Form of a name of the user's own object, for messages."""


def names_code(text: str) -> bool:
    """Whether a text is of the form `package.module:attribute`, so that `resolve` would import its module."""
    module, colon, attribute = text.partition(":")
    return bool(colon and attribute) and all(part.isidentifier() for part in module.split("."))


def resolve(name: str) -> object:
    """Returns the object that `package.module:attribute` names.

    `pkgutil.resolve_name` does not distinguish a missing module from a module that imports a missing one.

    Raises:
        ConfigError: the text is no such name, the module is not on `sys.path`, or it has no such attribute. Any other
            exception of the module's import is passed on, because it comes from the user's own code.
    """
    if not names_code(name):
        raise ConfigError(f"{name!r} is not of the form package.module:name")
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except SystemExit as error:
        ended = f"{name}: the module {module_name} ended the program while it was imported, with code {error.code}"
        raise ConfigError(f"{ended}; parse arguments under `if __name__ == '__main__'`") from None
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise  # the module exists, and itself imports a missing module
        raise ConfigError(f"{name}: no module {missing!r} on the Python path") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = _mistaken(module_name) or meant(attribute, dir(found))
            raise ConfigError(f"{name}: {module_name} has no attribute {attribute!r}{hint}")
        found = getattr(found, part)
    return found


def choose(key: str, name: object, shipped: Mapping[str, Any]) -> Any:
    """Returns the object that a key of a job names: one of Rudra's own, or the user's.

    Args:
        key: key for the error's text, such as `[model] name`.
        name: a name in `shipped`, or `package.module:name`. A value that is no text is the object itself.
        shipped: name -> object, or its place as `package.module:name`.

    Raises:
        ConfigError: there is no such object.
    """
    if not isinstance(name, str):
        return name
    found = shipped.get(name, name)
    if not isinstance(found, str):
        return found
    if ":" not in found:
        module, _, attribute = found.rpartition(".")
        yours = f"; did you mean {module}:{attribute}?" if module and names_code(f"{module}:{attribute}") else ""
        raise ConfigError(f"{key}: {unknown(name, [*shipped, CALLABLE], yours)}")
    try:
        return resolve(found)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def taken(module: str) -> bool:
    """Whether a module of the user's must not have this name, because Rudra or Python has it."""
    return module in OURS | sys.stdlib_module_names


def _mistaken(module: str) -> str:
    """Returns the end of a line about a module of Rudra's or of Python's that has the name of a user's module."""
    if not taken(module):
        return ""
    files = [Path(place) / f"{module}.py" for place in sys.path]
    own = getattr(sys.modules[module], "__file__", None)
    theirs = "".join(f", not {file}" for file in dict.fromkeys(files) if file.is_file() and str(file) != own)
    if module not in OURS and not theirs:
        return ""
    whose = "Rudra's" if module in OURS else "Python's"
    return f": it is {whose} own{theirs}; a module of yours needs another name"


def call(function: Callable[..., Any], name: str, options: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
    """Calls a factory with the options of the job, and with those `offered` arguments that its signature names.

    Args:
        function: factory, Rudra's or the user's.
        name: name of the factory in the job, for the error's text.
        options: keyword arguments from the job, which take precedence over `offered`.
        offered: keyword arguments that a factory receives if it has a parameter of the same name.

    Raises:
        ConfigError: the options do not fit the signature. The text lists the existing parameters.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in callables have no signature
        return function(**options)
    keywords = {key: value for key, value in offered.items() if key in signature.parameters} | dict(options)
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ConfigError(f"{name}: {misfit(error, signature, options)}") from None
    try:
        return function(**keywords)
    except SystemExit as error:
        raise ConfigError(f"{name}: ended the program when it was called, with code {error.code}") from None


def misfit(error: TypeError, signature: inspect.Signature, options: Mapping[str, Any], first: int = 0) -> str:
    """Returns the message about options that do not fit a signature. Parameters before `first` take no options."""
    takes = list(signature.parameters)[first:]
    strange = next((key for key in options if key not in takes), "")
    return f"{error}; its parameters: {', '.join(takes) or 'none'}{meant(strange, takes)}"
