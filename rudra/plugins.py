"""The user's own objects: found by `package.module:name`, called with the options of the job file."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rudra.errors import ConfigError


def resolve(name: str) -> object:
    """The object that `package.module:attribute` names.

    Raises:
        ConfigError: the text is no such name, the module is not on `sys.path`, or it has no such attribute. Whatever
            else the module raises while it is imported comes through, as it is the user's own code.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and attribute and all(part.isidentifier() for part in module_name.split("."))):
        raise ConfigError(f"{name!r} is not of the form package.module:name")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise  # the module is there, and itself imports something that is not
        raise ConfigError(f"{name}: no module {missing!r} on the Python path") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{name}: {module_name} has no attribute {attribute!r}")
        found = getattr(found, part)
    return found


def call(function: Callable[..., Any], name: str, options: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
    """Calls a factory with the options of the job, and with those of `offered` that its signature names.

    Args:
        function: the factory, ours or the user's.
        name: how the job names it, for the error's text.
        options: keyword arguments from the job; they win over `offered`.
        offered: keyword arguments that a factory may ask for by naming a parameter so.

    Raises:
        ConfigError: the options do not fit the signature; the text lists the parameters that exist.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in callables have none
        return function(**options)
    keywords = {key: value for key, value in offered.items() if key in signature.parameters} | dict(options)
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; its parameters: {', '.join(signature.parameters) or 'none'}") from None
    return function(**keywords)
