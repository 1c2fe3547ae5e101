"""A Matplotlib figure as lean SVG for the inside of an HTML page, its colours those of the page.

Colours are stand-ins, which become CSS variables: one picture serves light, dark and paper. Text stays text, in the
page's own font; Matplotlib lays it out as DejaVu Sans, which is wider than most.
"""

import contextlib
import io
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

from hvdtrain.untrusted import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, SOFT, GRID, EVENT = "#abc000", "#abc001", "#abc002", "#abc003"
SERIES = tuple(f"#abc01{number}" for number in range(6))
VARIABLES = {INK: "ink", SOFT: "soft", GRID: "line", EVENT: "event"} | {
    colour: f"s{number}" for number, colour in enumerate(SERIES)
}
STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 12,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "path.simplify_threshold": 0.2,
}
LONGEST = 1200
"""Characters of a description."""
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
MEASURES = ("d", "x", "y", "width", "height", "transform", "points")
NAMES = re.compile(r"(?:#|url\(#)([\w-]+)")
FRACTION = re.compile(r"-?\d+\.\d+")
LINK = "{http://www.w3.org/1999/xlink}href"


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Figures inside the block look as the page wants them, whatever the user's own style, and Matplotlib is quiet."""
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from matplotlib import style

        with style.context(STYLE, after_reset=True):
            yield
    finally:
        logger.setLevel(before)


def inline(figure: "Figure", key: str, title: str, description: str) -> Markup:
    """The figure as an `<svg>` that a screen reader announces by its title and description.

    Inside `drawing`. `key` is the page's own name for the picture: no two pictures share an id.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": key}):
        figure.savefig(text, format="svg", transparent=True, metadata=NO_METADATA)
    svg = text.getvalue()
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    root = ElementTree.fromstring(svg)  # noqa: S314
    _strip(root)
    _announce(root, key, title, description)
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704 - ElementTree has escaped it


def _strip(root: ElementTree.Element) -> None:
    """Without namespaces, fonts, sizes and ids that nothing refers to; lengths with one digit."""
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    used = {name for element in root.iter() for value in element.attrib.values() for name in NAMES.findall(value)}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = None
        if element.tag != "text":
            element.text = None
        else:
            anchor = re.search(r"text-anchor: (\w+)", element.get("style", ""))
            element.attrib = {name: element.attrib[name] for name in ("x", "y", "transform") if name in element.attrib}
            element.set("text-anchor", anchor[1] if anchor else "start")
        _strip_attributes(element, used)
    root.attrib = {"viewBox": root.attrib["viewBox"]}


def _strip_attributes(element: ElementTree.Element, used: set[str]) -> None:
    if element.get("id") not in used:
        element.attrib.pop("id", None)
    if LINK in element.attrib:
        element.set("href", element.attrib.pop(LINK))
    for name in MEASURES:
        if name in element.attrib:
            element.set(name, FRACTION.sub(_rounded, element.attrib[name]).replace("\n", " ").strip())


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.1f}".removesuffix(".0")


def _announce(root: ElementTree.Element, key: str, title: str, description: str) -> None:
    root.attrib |= {"role": "img", "aria-labelledby": f"{key}-title {key}-text"}
    texts = []
    for tag, suffix, text in (("title", "title", title), ("desc", "text", description)):
        element = ElementTree.Element(tag, {"id": f"{key}-{suffix}"})
        element.text = one_line(text, LONGEST)
        texts.append(element)
    root[:0] = texts
