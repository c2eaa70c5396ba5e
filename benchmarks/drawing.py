"""Draws pictures for docs/ as SVG. Text can be selected, and colours follow the reader's light or dark theme.

A picture is a list of SVG elements. A colour (`role` or `edge`) is the name of a CSS class in THEMES, which has a value
for each theme.
"""

from collections.abc import Iterable, Sequence
from html import escape

from lowmem.report.colours import INK, LIMIT, OF_CATEGORY

WIDTH = 800  # width of every picture in user units; a unit is a pixel in an unscaled picture
SANS, MONO = "system-ui, sans-serif", "ui-monospace, monospace"
THEMES = {  # CSS class -> colour on a light and on a dark page
    "page": ("#ffffff", "#12171d"),
    "panel": ("#f3f5f7", "#1c242c"),
    "ink": ("#1d2731", "#e8edf2"),
    "soft": ("#526372", "#a3b1bf"),
    "edge": ("#b4c0ca", "#4c5a67"),
    "host": (INK, "#8fa3b5"),
    "drive": ("#8a6d3b", "#c29b5b"),
    "bad": (LIMIT, "#f0806f"),
    **{name: (colour, colour) for name, colour in OF_CATEGORY.items()},
}


class Picture:
    """A picture of `WIDTH` x `height` units. Args: title: its name, for screen readers; about: its description, for
    screen readers."""

    def __init__(self, height: float, title: str, about: str) -> None:
        self.height, self.title, self.about = height, title, about
        self._elements: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        role: str = "ink",
        bold: bool = False,
        mono: bool = False,
        anchor: str = "start",
    ) -> None:
        """Writes a line of text. Args: y: position of the baseline; size: font size; anchor: the point of the text that
        is at x (start, middle or end)."""
        style = f'class="{role}{" mono" if mono else ""}" font-size="{size:g}"'
        style += ' font-weight="600"' if bold else ""
        style += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._elements.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(words, quote=False)}</text>')

    def lines(self, x: float, y: float, lines: Iterable[str], step: float = 17, **style) -> None:
        """Writes lines of text one below the other, `step` units apart."""
        for number, line in enumerate(lines):
            self.text(x, y + number * step, line, **style)

    def box(self, x: float, y: float, width: float, height: float, role: str, edge: str | None = None) -> None:
        """Fills a rectangle. Args: edge: colour of the border; None: no border. With a border, corners are rounded."""
        border = f' rx="6" style="stroke:var(--{edge})"' if edge else ""
        self._elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:g}" class="{role}"{border}/>'
        )

    def line(self, points: Sequence[tuple[float, float]], role: str = "edge", wide: float = 1.5) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        style = f'fill="none" style="stroke:var(--{role})" stroke-width="{wide:g}"'
        self._elements.append(f'<polyline points="{path}" {style}/>')

    def arrow(self, points: Sequence[tuple[float, float]], role: str = "soft", wide: float = 1.5) -> None:
        """Draws a line with an arrowhead at its last point. The last segment must be horizontal or vertical."""
        (from_x, from_y), (x, y) = points[-2:]
        dx, dy = (_sign(x - from_x), _sign(y - from_y))
        size = 4 + wide
        back = (x - size * dx, y - size * dy)
        self.line([*points[:-1], back], role, wide)
        side = (size * 0.6 * dy, size * 0.6 * dx)
        corners = [(x, y), (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1])]
        self._elements.append(f'<polygon points="{" ".join(f"{a:g},{b:g}" for a, b in corners)}" class="{role}"/>')

    def svg(self) -> str:
        """Returns the picture as SVG."""
        light, dark = (_variables(theme) for theme in zip(*THEMES.values(), strict=True))
        used = [name for name in THEMES if any(f'"{name}' in e or f"--{name})" in e for e in self._elements)]
        fills = "".join(f".{name}{{fill:var(--{name})}}" for name in [*dict.fromkeys(["page", *used])])
        style = (
            f"svg{{{light};font-family:{SANS}}}.mono{{font-family:{MONO}}}{fills}"
            f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
        )
        size = f'viewBox="0 0 {WIDTH} {self.height:g}" width="{WIDTH}" height="{self.height:g}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title><desc>{escape(self.about)}</desc>",
                f"<style>{style}</style>",
                f'<rect width="{WIDTH}" height="{self.height:g}" rx="8" class="page"/>',
                *self._elements,
                "</svg>\n",
            ]
        )


def _variables(colours: Iterable[str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in zip(THEMES, colours, strict=True))


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
