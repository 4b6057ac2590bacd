"""A run's figures, as PNG and SVG.

Knows which figure a scenario has and how files are written. Must not know what stands where in them.
Invariant: the same run gives the same files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from bench import results
from bench.drawing import DPI, RC
from bench.files import naming
from bench.groups import grouped
from bench.lines import growing
from bench.records import Run
from bench.results import Part


def write_figures(run: Run, folder: Path) -> dict[str, list[Path]]:
    """One figure for each scenario that has samples, as `NAME.png` and `NAME.svg`; the files of each by its name.

    Raises OSError, with the name of the file, where it cannot write.
    """
    written: dict[str, list[Path]] = {}
    scenes: dict[str, list[Part]] = {}
    for part in results.parts(run):
        scenes.setdefault(part.scene.name, []).append(part)
    with matplotlib.rc_context(RC):
        for name, parts in scenes.items():
            if any(part.lines for part in parts):
                written[name] = _save(draw(parts, run), folder / name)
    return written


def draw(parts: Sequence[Part], run: Run) -> Figure:
    """The figure of one scene: groups of points if it has several parts, otherwise lines over sizes."""
    with matplotlib.rc_context(RC):
        return grouped(parts, run) if any(part.detail for part in parts) else growing(parts[0], run)


def _save(figure: Figure, stem: Path) -> list[Path]:
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    with naming(png):
        figure.savefig(png, dpi=DPI, metadata={"Software": None})
    with naming(svg):
        figure.savefig(svg, metadata={"Date": None})
    return [png, svg]
