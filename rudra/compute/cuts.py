"""Models as chains of layers, and cuts of a chain in two: for a learner and for a stage server.

Front and back hold the model's own parameters and buffers under the names that they have in the model. So the flat
vector of the model begins with the parameters of the front, followed by the parameters of the back.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rudra.compute.buffers import tried
from rudra.errors import ConfigError, one_line, unknown


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer.

    Attributes:
        name: Name in the model.
        run: Module or function that computes the layer.
        within: Names of modules inside the layer where a cut is impossible.
    """

    name: str
    run: nn.Module
    within: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CrossingValue:
    """Output that one layer passes to the next.

    Attributes:
        shape: Shape of the tensor, with samples as the first dimension. None if it is not a single tensor.
        dtype: Type of the tensor.
        changed: Whether the next layers overwrite it, as in-place activations do.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    changed: bool


@dataclass(frozen=True)
class LayerChain:
    """A model as layers that give its output if applied one after the other.

    Attributes:
        model: The whole model.
        names: Names of the layers in the model.
        layers: Modules that compute the layers. They hold the model's own parameters and buffers.
        crossings: Values between consecutive layers, for the example that was used to find the chain.
        within: For each layer, names of modules inside it where a cut is impossible.
    """

    model: nn.Module
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    crossings: tuple[CrossingValue, ...]
    within: tuple[tuple[str, ...], ...]

    def cut(self, at: str | int) -> tuple[nn.Module, nn.Module]:
        """Returns front and back. Their inputs and outputs have the format of the model's.

        Args:
            at: First layer of the back, or a part of the model that begins with this layer. A number is the number of
                layers in the front.

        Raises:
            ConfigError: No such layer, or the model cannot be cut there.
        """
        index = self.place(at)
        reason = self.refusal(index)
        if reason is not None:
            raise ConfigError(f"[placement] cut = {at!r}: {reason}")
        return self._parts(index)

    def place(self, at: str | int) -> int:
        """Returns the number of layers in front of a cut.

        Raises:
            ConfigError: No such layer.
        """
        if isinstance(at, int):
            if not 0 < at < len(self.layers):
                text = f"the model has {len(self.layers)} layers; valid: 1 to {len(self.layers) - 1}"
                raise ConfigError(f"[placement] cut = {at}: {text}")
            return at
        for index, name in enumerate(self.names):
            if name == at or name.startswith(f"{at}."):
                return index
        for name, within in zip(self.names, self.within, strict=True):
            if any(each == at or each.startswith(f"{at}.") for each in within):
                text = f"is inside layer {name!r}, where more than one tensor crosses"
                raise ConfigError(f"[placement] cut = '{at}' {text}; valid: {', '.join(self.names[1:])}")
        raise ConfigError(f"[placement] cut = {unknown(at, self.names[1:])}")

    def refusal(self, index: int) -> str | None:
        """Returns the reason why the model cannot be cut after `index` layers, or None if it can."""
        if index == 0:
            return f"nothing is in front of the first layer; valid: {', '.join(self.names[1:])}"
        crossing = self.crossings[index - 1]
        between = f"between {self.names[index - 1]!r} and {self.names[index]!r}"
        if crossing.shape is None:
            return f"more than one tensor crosses {between}"
        if crossing.dtype is None or not crossing.dtype.is_floating_point:
            return f"the tensor {between} is {crossing.dtype}, which has no gradient"
        front, back = self._parts(index)
        for kind in ("parameters", "buffers"):
            reason = self._misplaced(kind, front, back)
            if reason is not None:
                return reason
        for side, part in (("front", front), ("back", back)):
            if not any(p.requires_grad for p in part.parameters()):
                return f"the {side} would have no parameter to train"
        return None

    def admissible(self) -> tuple[int, ...]:
        """Returns the numbers of layers after which the model can be cut."""
        return tuple(index for index in range(1, len(self.layers)) if self.refusal(index) is None)

    def _parts(self, index: int) -> tuple["_Part", "_Part"]:
        names = _Names(self.model)
        front = _Part(self.layers[:index], names, copies=False)
        return front, _Part(self.layers[index:], names, copies=self.crossings[index - 1].changed)

    def _misplaced(self, kind: str, front: nn.Module, back: nn.Module) -> str | None:
        """Returns why the model's parameters, or its buffers, are not the front's followed by the back's."""
        whole = {id(each): name for name, each in getattr(self.model, f"named_{kind}")()}
        sides = [{id(each): name for name, each in getattr(part, f"named_{kind}")()} for part in (front, back)]
        for key, name in sides[0].items():
            if key in sides[1]:
                return f"{name} is used on both sides (tied weights)"
        for key, name in itertools.chain(sides[0].items(), sides[1].items()):
            if key not in whole:
                return f"{name} belongs to a layer, but not to the model"
        for key, name in whole.items():
            if key not in sides[0] and key not in sides[1]:
                return f"{name} belongs to no layer"
        for ours, model in zip([*sides[0], *sides[1]], whole, strict=True):
            if ours != model:
                order = f"the model has {whole[model]} where the layers have {whole[ours]}"
                return f"the model's {kind} are not in the order of its layers: {order}"
        return None


_TENSORS = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that would keep references to all layers."""


class _Part(nn.Module):
    """Layers applied one after the other. Their parameters and buffers keep the names of the model.

    Args:
        layers: Modules in order.
        names: Names in the model.
        copies: Whether to copy the input first, because the layers overwrite it.
    """

    def __init__(self, layers: Sequence[nn.Module], names: "_Names", *, copies: bool) -> None:
        super().__init__()
        self._layers = tuple(layers)  # not registered as modules, which would change their names
        self._copies = copies
        # Hooks on a parameter's gradients, for example, live only as long as the objects they are registered at.
        modules = map(vars, names.model.modules())
        self._kept = [{name: kept for name, kept in each.items() if name not in _TENSORS} for each in modules]
        self.training = layers[0].training
        for layer in layers:
            for path, held in names.held(layer):
                names.place(self, path, held)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        first, *others = self._layers
        if self._copies:
            args = tuple(each.clone() for each in args)
        value = first(*args, **keywords)
        for layer in others:
            value = layer(value)
        return value


class _Names:
    """Names of a model's modules, parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = {id(each): name for name, each in model.named_modules()}
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.tensors = {id(each): name for name, each in tensors}

    def held(self, layer: nn.Module) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
        """Yields the outermost modules of the model in a layer, and the layer's other parameters and buffers."""
        name = self.modules.get(id(layer))
        if name:
            yield name, layer
            return
        for child in layer.children():
            yield from self.held(child)
        for key, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            yield self.tensors.get(id(tensor), key), tensor

    def place(self, part: nn.Module, path: str, held: nn.Module | torch.Tensor) -> None:
        """Adds a module, parameter or buffer to a part of the model under its name."""
        *parents, key = path.split(".")
        for parent in parents:
            if parent not in part._modules:
                part.add_module(parent, nn.Module())
            part = part.get_submodule(parent)
        if key in part._modules or key in part._parameters or key in part._buffers:
            return
        if isinstance(held, nn.Module):
            part.add_module(key, held)
        elif isinstance(held, nn.Parameter):
            part.register_parameter(key, held)
        else:
            part.register_buffer(key, held)


def chain(model: nn.Module, example: Any) -> LayerChain:
    """Finds the chain of layers in a model.

    The layers are the result of its `stages()` (modules in order, or a mapping of names to modules), the children of
    `nn.Sequential`, or the result of torch.fx: modules with one input tensor, each with the functions that follow it.

    Args:
        model: Model on the device of the example.
        example: Inputs of some samples.

    Raises:
        ConfigError: The model is not a chain of two or more layers. The text says why.
    """
    reasons: list[str] = []
    layers = _stages(model) if callable(getattr(model, "stages", None)) else list(_expanded(_Layer("", model), reasons))
    if len(layers) < 2:
        reason = reasons[0] if reasons else "it is one layer"
        advice = "make it of nn.Sequential, or give it `stages()`"
        raise ConfigError(f"[model] {type(model).__name__} cannot be cut, {reason}; {advice}")
    runs = tuple(layer.run for layer in layers)
    crossings = _tried(model, runs, example)
    return LayerChain(model, tuple(_unique(layers)), runs, crossings, tuple(layer.within for layer in layers))


def _stages(model: nn.Module) -> list[_Layer]:
    """Returns the layers that the user's model declares."""
    found: Any = model.stages()  # type: ignore[operator]
    named = {id(module): name for name, module in model.named_modules()}
    if isinstance(found, Mapping):
        layers = [_Layer(str(name), module) for name, module in found.items()]
    else:
        layers = [_Layer(named.get(id(each), f"stages.{index}"), each) for index, each in enumerate(found)]
    for layer in layers:
        if not isinstance(layer.run, nn.Module):
            kind = type(layer.run).__name__
            raise ConfigError(f"[model] {type(model).__name__}.stages() has a {kind}; valid: torch.nn.Modules")
    return layers


def _expanded(layer: _Layer, reasons: list[str]) -> Iterator[_Layer]:
    """Yields the layers inside a layer. If the layer is not a chain, yields the layer and records the reason."""
    module = layer.run
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if hooked or getattr(module, "_backward_pre_hooks", None):
        reasons.append(f"as {layer.name or 'it'} has hooks")
        yield layer
    elif isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for name, child in module._modules.items():
            if child is not None:
                yield from _expanded(_Layer(_joined(layer.name, name), child), reasons)
    elif type(module).__module__.startswith("torch."):
        reasons.append(f"as torch.nn.{type(module).__name__} is one layer")
        yield layer
    else:
        pieces = _traced(layer, reasons)
        if len(pieces) < 2:
            inside = tuple(_joined(layer.name, name) for name, _ in module.named_modules() if name)
            pieces = [_Layer(layer.name, module, inside)]
        yield from pieces


def _traced(layer: _Layer, reasons: list[str]) -> list[_Layer]:
    """Returns the layers of a module's `forward`, fewer than two if it is not a chain."""
    module = layer.run
    try:
        graph = _graph(module)
    except Exception as error:  # a user's `forward` may fail in any way on a value that is not a tensor
        reasons.append(f"as torch.fx cannot trace {type(module).__name__}: {one_line(error).split('. ')[0]}")
        return []
    if graph is None:
        reasons.append(f"as the `forward` of {type(module).__name__} depends on `training`")
        return []
    nodes = [node for node in graph.nodes if node.op != "get_attr"]
    modules = [place for place, node in enumerate(nodes) if node.op == "call_module"]
    starts = [0, *(place for place in modules[1:] if _alone(nodes, place))]
    cuts = itertools.pairwise([*starts, len(nodes)]) if modules else []
    found = [each for start, stop in cuts for each in _piece(layer, graph, nodes, start, stop, reasons)]
    if len(found) < 2:
        reasons.insert(0, f"as more than one tensor crosses everywhere in {type(module).__name__}")
    return found


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _graph(module: nn.Module) -> fx.Graph | None:
    """Returns the graph of a module's `forward` over its children, or None if it depends on the training mode."""
    training = module.training
    try:
        graphs = []
        for mode in (True, False):
            module.training = mode
            graphs.append(_Tracer().trace(module))
    finally:
        module.training = training
    return graphs[0] if str(graphs[0]) == str(graphs[1]) else None


def _alone(nodes: Sequence[fx.Node], place: int) -> bool:
    """Whether only one value passes from the nodes before a place to the later nodes."""
    later = set(nodes[place:])
    return sum(any(user in later for user in node.users) for node in nodes[:place]) == 1


def _piece(
    layer: _Layer, graph: fx.Graph, nodes: Sequence[fx.Node], start: int, stop: int, reasons: list[str]
) -> list[_Layer]:
    """Returns the layers of a section of the graph. One value enters it, except at the beginning, and one leaves it."""
    module, part = layer.run, nodes[start:stop]
    result = _crossing(nodes, stop)
    modules = [place for place, node in enumerate(part) if node.op == "call_module"]
    names = [_joined(layer.name, str(part[place].target)) for place in modules]
    before, body = part[: modules[0]], part[modules[0] :]
    functions = [node for node in before if node.op != "placeholder"]
    if len(names) == 1 and _plain(body, result) and (not functions or _alone(nodes, start + modules[0])):
        called = body[0]
        found = list(_expanded(_Layer(names[0], module.get_submodule(str(called.target))), reasons))
        if functions:
            first = found[0]
            run = _graph_module(module, graph, before, _crossing(nodes, start), called.all_input_nodes[0])
            found[0] = _Layer(first.name, _Then(run, first.run), first.within)
        if len(body) > 1 and not (body[1].op == "output" and body[1].args[0] is called):
            last = found[-1]
            run = _graph_module(module, graph, body[1:], called, result)
            found[-1] = _Layer(last.name, _Then(last.run, run), last.within)
        return found
    run = _graph_module(module, graph, part, _crossing(nodes, start), result)
    return [_Layer(names[0], run, tuple(names))]


def _crossing(nodes: Sequence[fx.Node], place: int) -> fx.Node | None:
    """Returns the value that passes from the nodes before a place to the later nodes, or None at both ends."""
    later = set(nodes[place:])
    return next((node for node in nodes[:place] if any(user in later for user in node.users)), None)


def _plain(body: Sequence[fx.Node], result: fx.Node | None) -> bool:
    """Whether some nodes are a module, called with one value, and functions of its output."""
    first, given = body[0], set(body)
    alone = first.op == "call_module" and len(first.args) == 1 and not first.kwargs and len(first.all_input_nodes) == 1
    needed = [each for node in body[1:] for each in node.all_input_nodes] + ([result] if result else [])
    return alone and all(each in given or each.op == "get_attr" for each in needed)


def _graph_module(
    module: nn.Module, graph: fx.Graph, part: Sequence[fx.Node], given: fx.Node | None, result: fx.Node | None
) -> fx.GraphModule:
    """Builds a module that computes some nodes of a module's graph.

    Args:
        module: Module of the graph.
        graph: The whole graph.
        part: Nodes to compute.
        given: Node that supplies the input. None: the nodes take the graph's inputs.
        result: Node that supplies the output. None: the nodes give the graph's output.
    """
    made, wanted = fx.Graph(), set(part)
    values: dict[fx.Node, fx.Node] = {}
    if given is not None:
        values[given] = made.placeholder("value")
    for node in graph.nodes:
        if node in wanted or (node.op == "get_attr" and any(user in wanted for user in node.users)):
            values[node] = made.node_copy(node, values.__getitem__)
    if result is not None:
        made.output(values[result])
    return fx.GraphModule(module, made)


class _Then(nn.Module):
    """A layer and the functions after it, or functions and the layer after them."""

    def __init__(self, first: nn.Module, then: nn.Module) -> None:
        super().__init__()
        self.first, self.then = first, then
        self.training = first.training

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.then(self.first(*args, **keywords))


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _unique(layers: Sequence[_Layer]) -> Iterator[str]:
    """Yields the names of the layers. A module that is used again gets a number after its name."""
    seen: dict[str, int] = {}
    for layer in layers:
        seen[layer.name] = seen.get(layer.name, 0) + 1
        yield layer.name if seen[layer.name] == 1 else f"{layer.name}:{seen[layer.name]}"


def _tried(model: nn.Module, layers: Sequence[nn.Module], example: Any) -> tuple[CrossingValue, ...]:
    """Runs the layers on an example, and returns the values between consecutive layers.

    Raises:
        ConfigError: The layers do not give the output of the model.
    """
    values: list[tuple[Any, int]] = []

    def compute(*args: Any, **keywords: Any) -> Any:
        value = layers[0](*args, **keywords)
        for layer in layers[1:]:
            values.append((value, value._version if isinstance(value, torch.Tensor) else 0))
            value = layer(value)
        return value

    found = tried(_Calling(model, compute), example)
    if not _same(found, tried(model, example)):
        raise ConfigError(f"[model] {type(model).__name__}: its stages in sequence do not compute its output")
    return tuple(
        CrossingValue(tuple(value.shape), value.dtype, value._version != version)
        if isinstance(value, torch.Tensor)
        else CrossingValue(None, None, changed=False)
        for value, version in values
    )


class _Calling(nn.Module):
    """A model whose output another function computes."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = model, function
        self.training = model.training

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.function(*args, **keywords)


def _same(one: Any, other: Any) -> bool:
    """Whether two outputs are bitwise equal, with NaN equal to NaN."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return isinstance(other, Sequence) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other)
