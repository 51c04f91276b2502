"""Detection of layers whose forward pass can wait for its weights, and be repeated without a trace.

Torch's own layers can. A user's layer might read weights in a way that torch functions do not show, for example by
TorchScript, compiled code or a thread. It might also keep something from pass to pass, for example a count of passes.
So its code must consist of torch functions, layers, parameters and numbers only. Any other code is not plain.
"""

import ast
import builtins
import inspect
import math
import textwrap
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from rudra.compute.flat_buffers import travels

_NODES = (
    *(
        ast.arguments,
        ast.arg,
        ast.Return,
        ast.Assign,
        ast.AnnAssign,
        ast.AugAssign,
        ast.Expr,
        ast.If,
        ast.For,
        ast.Pass,
    ),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Constant, ast.Tuple, ast.List, ast.Starred),
    *(ast.Subscript, ast.Slice, ast.Name, ast.Attribute, ast.Call, ast.keyword, ast.ListComp, ast.GeneratorExp),
    *(ast.comprehension, ast.Assert, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
    *(ast.JoinedStr, ast.FormattedValue),
)
"""Parts of plain code. There are no assignments to attributes, no nested functions, and no `global`."""

_BUILTINS = frozenset({"range", "len", "zip", "enumerate", "int", "float", "bool", "min", "max", "sum", "abs", "tuple"})
_CREATING = frozenset({"zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "randint"})
"""Functions of torch that make tensors. A mode of torch functions sees these, although torch does not list them."""

_REFUSED = frozenset({"backward", "register_hook", "requires_grad_", "retain_grad", "share_memory_", "apply_", "map_"})
"""Methods of tensors that leave a trace or call other code."""

_NUMBERS = (int, float, str, type(None), torch.dtype, torch.Size)  # a bool is an int


def is_plain(layer: nn.Module) -> bool:
    """Returns whether a layer's own code is plain. Its parts are not considered."""
    if isinstance(layer, torch.jit.ScriptModule) or layer._compiled_call_impl is not None:
        return False
    if _is_torchs(type(layer)):
        called = [each for each in vars(layer).values() if callable(each) and not isinstance(each, nn.Module)]
        return all(str(getattr(each, "__module__", None)).startswith(("torch", "rudra.")) for each in called)
    forward = inspect.getattr_static(type(layer), "forward")
    written = [cls for cls in type(layer).__mro__ if not _is_torchs(cls) and cls is not object]
    added = {name for cls in written for name in vars(cls) if name not in _HARMLESS}
    if any(hasattr(nn.Module, name) for name in added - {"forward"}):
        return False  # for example __call__
    if added and [cls for cls in type(layer).__mro__ if _is_torchs(cls)] != [nn.Module]:
        return False  # torch's layer may call what this class replaces
    more = {name for name, value in vars(layer).items() if not _is_number(value)}
    if _of_tensors() & (added | more) or not isinstance(forward, FunctionType):
        return False  # other code may call a layer's method in the belief that it is a tensor's
    return _is_torchs(forward) or _Code(layer).allows(forward)


_HARMLESS = frozenset(
    {
        *vars(type("Plain", (nn.Module,), {"x": 0, "__doc__": ""})),
        "__init__",
        "__doc__",
        "extra_repr",
        "__annotations__",
    }
    | {"__static_attributes__", "__firstlineno__", "__annotate__", "__annotations_cache__"}
)


def _is_torchs(what: type | FunctionType) -> bool:
    return what.__module__.startswith(("torch.nn.", "rudra."))


class _Code:
    """The code of one layer.

    Args:
        layer: The layer, whose attributes plain code does not change.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._seen: set[FunctionType] = set()

    def allows(self, function: FunctionType, *, method: bool = True) -> bool:
        """Returns whether a function and all functions that it calls are plain."""
        if function in self._seen:
            return True
        self._seen.add(function)
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body
        except (OSError, SyntaxError, ValueError):
            return False
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or function.__closure__:
            return False
        if not _is_source_of(function.__code__, node):
            return False
        if method and not function.__code__.co_argcount:
            return False
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        me = function.__code__.co_varnames[0] if method else ""
        return all(isinstance(each, _NUMBERS) for each in defaults) and all(
            self._allows_statement(each, function, me) for each in node.body
        )

    def _allows_statement(self, node: ast.AST, function: FunctionType, me: str) -> bool:
        found = list(_but_annotations(node))
        bases = {id(each.value) for each in found if isinstance(each, ast.Attribute)}
        calls = {id(each.func) for each in found if isinstance(each, ast.Call)}
        for each in found:
            use = "base" if id(each) in bases else "call" if id(each) in calls else ""
            if not isinstance(each, _NODES):
                return False
            if isinstance(each, ast.Attribute | ast.Subscript) and not isinstance(each.ctx, ast.Load):
                return False
            if isinstance(each, ast.Attribute):
                if not self._allows_attribute(each, function, me, use):
                    return False
            elif isinstance(each, ast.Name) and each.id == me:
                if use != "base" or not isinstance(each.ctx, ast.Load):
                    return False
            elif isinstance(each, ast.Name) and each.id not in _variables(function):
                known = isinstance(each.ctx, ast.Load) and self._allows_global(each.id, function, use)
                if not known:
                    return False
        return True

    def _allows_global(self, name: str, function: FunctionType, use: str) -> bool:
        """Whether code may use a name from outside the function, as the base of an attribute, to call it, or else."""
        if name not in function.__globals__:
            return name in _BUILTINS and hasattr(builtins, name) and use == "call"
        found = function.__globals__[name]
        return use == "base" if isinstance(found, ModuleType) else self._allows_value(found, use)

    def _allows_value(self, found: Any, use: str) -> bool:
        if isinstance(found, _NUMBERS):
            return not use
        if use == "call" and isinstance(found, FunctionType) and not found.__module__.startswith("torch"):
            return self.allows(found, method=False)
        return use == "call" and _is_function_of_torch(found)

    def _allows_attribute(self, node: ast.Attribute, function: FunctionType, me: str, use: str) -> bool:
        """Whether code may use an attribute: of a module of functions, of the layer or its parts, or of a tensor."""
        names, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            names.insert(0, base.attr)
            base = base.value
        found: Any = None
        if isinstance(base, ast.Name) and base.id == me:
            found = self._layer
        elif isinstance(base, ast.Name) and base.id not in _variables(function):
            found = function.__globals__.get(base.id)
        if isinstance(found, ModuleType):
            for name in names:
                found = getattr(found, name, None)
            return use == "base" if isinstance(found, ModuleType) else self._allows_value(found, use)
        while isinstance(found, nn.Module) and names:
            name = names.pop(0)
            plain = inspect.getattr_static(type(found), name, None)
            if isinstance(plain, FunctionType) and name not in vars(found):
                own = found is self._layer and not names and not _is_torchs(plain)
                return own and use == "call" and self.allows(plain)
            if plain is not None and name != "training":
                return False  # for example a property
            found = getattr(found, name, None)
            if not isinstance(found, nn.Module):
                tensor = isinstance(found, torch.Tensor) and _travels(self._layer, found)
                if not tensor and not _is_number(found):
                    return False
        return all(name in _of_tensors() for name in names)


def _is_number(found: Any) -> bool:
    several = isinstance(found, tuple) and all(isinstance(each, _NUMBERS) for each in found)
    return several or isinstance(found, _NUMBERS)


def _travels(layer: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a travelling buffer of a layer or its parts."""
    own = any(each is tensor for each in (*layer.parameters(), *layer.buffers()))
    return own and (isinstance(tensor, nn.Parameter) or travels(tensor))


def _but_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and all nodes in it, except annotations, which are not computed."""
    yield node
    for name, value in ast.iter_fields(node):
        if name != "annotation":
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _but_annotations(each)


def _is_source_of(code: CodeType, node: ast.FunctionDef) -> bool:
    """Whether a code has the name of a source, and uses only names in it. A file may change after its import."""
    found = [each for statement in node.body for each in _but_annotations(statement)]
    names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in found}
    codes = [code, *(each for each in code.co_consts if isinstance(each, CodeType))]
    return node.name == code.co_name and all(name in names for each in codes for name in each.co_names)


def _variables(function: FunctionType) -> set[str]:
    """Returns the names of variables, also of those in comprehensions."""
    code = function.__code__
    codes = [code, *(each for each in code.co_consts if isinstance(each, CodeType))]
    return {name for each in codes for name in (*each.co_varnames, *each.co_cellvars)}


@cache
def _functions() -> frozenset[int]:
    """Ids of the functions that a mode of torch functions sees."""
    found = {id(each) for functions in torch.overrides.get_overridable_functions().values() for each in functions}
    found |= {id(getattr(torch, name)) for name in _CREATING}
    return frozenset(found | {id(each) for name, each in vars(math).items() if not name.startswith("_")})


def _is_function_of_torch(what: Any) -> bool:
    return id(what) in _functions()


@cache
def _of_tensors() -> frozenset[str]:
    """Names of tensors' methods and properties that a mode sees."""
    found = {name for name in dir(torch.Tensor) if not name.startswith("_")}
    return frozenset(found - _REFUSED)
