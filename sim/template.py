"""The commented configuration file that `fedreuse init` writes, made from the configuration's own types."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from fedreuse.proto.faults import Fault
from fedreuse.sim.config import RunConfig, load_config
from fedreuse.sim.recipes import RECIPES, SUMMARIES

_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def template(method: str) -> str:
    """YAML with every key, its default under `method`, what it means and what is allowed."""
    config = load_config(None, [f"method={method}"])
    lines = [
        "# fedreuse configuration. Every key may be left out; these are the defaults of the method below.",
        "# A key inside a section is written section.key=value on the command line.",
        "#",
        *(f"#   {name:13} {SUMMARIES[name]}" for name in RECIPES),
        "",
    ]
    schema = RunConfig.model_json_schema()
    for name, value in config.model_dump(mode="json").items():
        field = getattr(config, name)
        if isinstance(field, BaseModel):
            lines.append("")
            if summary := (type(field).__doc__ or "").strip():
                lines += [f"# {line.strip()}" for line in summary.splitlines() if line.strip()]
            lines.append(f"{name}:")
            definitions = schema["$defs"][type(field).__name__]["properties"]
            lines += [f"  {_line(key, item, definitions[key])}" for key, item in value.items()]
        elif name != "faults":
            lines.append(_line(name, value, schema["properties"][name]))
    fault = json.dumps({key: item for key, item in Fault(round=3, client=2).model_dump().items() if item})
    lines += [
        "",
        "# Planned faults, played alike by every body; see fedreuse.proto.faults.",
        "# faults:",
        f"#   - {fault}",
    ]
    return "\n".join([*lines, "faults: []", ""])


def _line(key: str, value: Any, definition: dict[str, Any]) -> str:
    notes = [definition.get("description", ""), _allowed(definition)]
    comment = "; ".join(note for note in notes if note)
    text = f"{key}: {json.dumps(value, ensure_ascii=False)}"
    return f"{text}  # {comment}" if comment else text


def _allowed(definition: dict[str, Any]) -> str:
    options = [definition, *definition.get("anyOf", [])]
    for option in options:
        if "enum" in option:
            return "one of " + ", ".join(map(str, option["enum"]))
    limits = [
        f"{sign} {option[key]:g}" for option in options for key, sign in _LIMITS.items() if key in option
    ]
    return " and ".join(limits)
