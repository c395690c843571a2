"""What every page has around its content: style, script, plotly, and the data that the script draws from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from fedreuse.sim.report.plot import Plot

HERE = "fedreuse.sim.report"


def fill(
    package: str, *, data: Any, template: str = "page.html", script: str = "page.js", **values: Any
) -> str:
    """A template of a package, filled; it may import from this package's parts.html.

    `data` is for the script, which lies in this package.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader(HERE, ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=metadata.version("fedreuse"),
        style=_resource("page.css"),
        script=_resource(script),
        plotly=get_plotlyjs(),
        data=_embedded(data),
        **values,
    )


def embeddable(plots: Iterable[Plot]) -> dict[str, Any]:
    """Figures and their numbers, for page.js."""
    return {
        plot.key: {
            "figure": plot.figure,
            "columns": plot.table.columns,
            "rows": plot.table.rows,
            "keys": plot.keys,
        }
        for plot in plots
    }


def write(path: Path, text: str) -> None:
    """Write a page, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _resource(name: str) -> str:
    return resources.files(HERE).joinpath(name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """JSON that no text in it can end the script element around it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
