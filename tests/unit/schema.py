"""The JSON schema of job files, for `rudra/job/schema.json`; `python -m tests.unit.schema` writes it.

It is written beforehand because the names of all that is shipped are known to modules that import torch, and because
shells complete keys by it.
"""

import json
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

import protocols
import topologies
from rudra.compute.networks import MODELS
from rudra.compute.tasks import TASKS
from rudra.data.readers import READERS
from rudra.job.changes import MAY_CHANGE, WITHIN
from rudra.job.job import Job
from rudra.job.schema import FILE
from rudra.job.tables import OPTIMIZERS, Hook
from rudra.prepare.cost_files import presets

CALLABLE = {"type": "string", "pattern": r"^[\w.]+:[\w.]+$"}
PATTERNS = {  # what the tables check in code
    "training.target": r"^\s*(\w+ +)?[^\s<>=]+ *(>=|<=) *\S+\s*$",
    "results.checkpoint_every": r"^(auto|never|0*[1-9][0-9]{0,9} *(update|epoch|s)s?)$",
    "results.keep_checkpoints": r"^(never|0*[1-9][0-9]{0,9} *(update|epoch)s?)$",
}


def _names(names: Iterable[str]) -> dict[str, Any]:
    """One of these, or the user's own."""
    return {"anyOf": [{"type": "string", "enum": [*names]}, CALLABLE]}


KINDS: dict[str, dict[str, Any]] = {  # what types say too little of
    "model.name": _names(MODELS),
    "data.name": _names(READERS),
    "data.collate": CALLABLE,
    "augment.name": CALLABLE,
    "task.name": _names(TASKS),
    "task.metrics": {"type": "array", "items": CALLABLE},
    "optimizer.name": {"type": "string", "enum": [*OPTIMIZERS]},
    "optimizer.schedule": _names(["step", "cosine", "plateau"]),
    "protocol.name": _names(protocols.shipped()),
    "protocol.correction": _names(protocols.corrections()),
    "topology.name": _names(["auto", *topologies.shipped()]),
    "simulation.costs": {"anyOf": [{"type": "string", "enum": [*presets(), "defaults"]}, {"type": "string"}]},
    "hooks.call": _names(Hook.SHIPPED),
    # Keys of the job that stand in these are dotted, which makes tables of them.
    "study.grid": {"type": "object"},
    "study.quick_grid": {"type": "object"},
    "study.quick": {"type": "object"},
    "study.points": {"type": "array", "items": {"type": "object"}},
    "study.quick_points": {"type": "array", "items": {"type": "object"}},
    **{key: {"type": "string", "pattern": pattern} for key, pattern in PATTERNS.items()},
}


def text() -> str:
    """The file."""
    schema = Job.model_json_schema(schema_generator=GenerateJsonSchema)
    plain: dict[str, Any] = _plain(schema, schema.pop("$defs"))
    for key, kind in KINDS.items():
        table, name = key.split(".")
        place = plain["properties"][table]
        keys = place.get("items", place)["properties"]
        keys[name] = {k: v for k, v in keys[name].items() if k in {"description", "default"}} | kind
    group = plain["properties"]["optimizer"]["properties"]["groups"]["items"]
    names = group["properties"]["parameters"]
    several = {"type": names.pop("type"), "items": names.pop("items")}
    names |= {"anyOf": [{"type": "string"}, several]}
    group["required"] = ["parameters"]
    del names["default"]
    change = plain["properties"]["changes"]["items"]
    change["oneOf"] = [{"required": [key]} for key in ("at_epoch", "at_update")]
    changes = change["properties"]
    for table, may_change in MAY_CHANGE.items():
        its_keys = plain["properties"][table]["properties"]
        keys = {key: {k: v for k, v in deepcopy(its_keys[key]).items() if k != "default"} for key in may_change}
        about = changes[table]["description"]
        changes[table] = _closed(about, keys)
    for path, may_change in WITHIN.items():
        table, *inner = path.split(".")
        within = changes[table]
        for key in inner:
            within = within["properties"][key]
        keys = within.get("properties", {})
        within |= _closed(within["description"], {key: keys.get(key, {}) for key in may_change})
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Rudra job"}
    plain["description"] = "A job for Rudra: what is trained, how, and on what."
    return json.dumps({**head, **plain}, ensure_ascii=False, indent=1) + "\n"


def _closed(description: str, keys: dict[str, Any]) -> dict[str, Any]:
    """A table with these keys and no other."""
    return {"description": description, "type": "object", "additionalProperties": False, "properties": keys}


def _plain(node: Any, definitions: dict[str, Any]) -> Any:
    """Without references, which not every editor follows, without null, which TOML lacks, and without titles."""
    if isinstance(node, list):
        return [_plain(inner, definitions) for inner in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        node = {**definitions[node["$ref"].rpartition("/")[2]], **{k: v for k, v in node.items() if k != "$ref"}}
        node.pop("default", None)
    node = {k: _plain(v, definitions) if k != "default" else v for k, v in node.items()}
    if isinstance(node.get("title"), str):
        del node["title"]
    if node.get("format") == "path":
        del node["format"]
    if node.get("default", ...) is None:
        del node["default"]
    if "anyOf" in node:
        node["anyOf"] = [kind for kind in node["anyOf"] if kind != {"type": "null"}]
        if len(node["anyOf"]) == 1:
            node |= node.pop("anyOf")[0]
    return node


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
