"""An SVG picture of text elements and shapes, in light and in dark colors.

The colors are classes. A viewer in dark mode selects the dark ones, also in an `<img>`. Each picture has its own
background, so that it is legible where a viewer selects the wrong ones.
"""

from __future__ import annotations

from html import escape

# Name: (light, dark). Text in each of them has a contrast of at least 4.5 on the background.
COLORS = {
    "text": ("#1f2328", "#e6edf3"),
    "faint": ("#57606a", "#9da7b3"),
    "red": ("#b3261e", "#ff8a80"),
    "orange": ("#8a4b00", "#f0b65a"),
    "green": ("#1a6b2f", "#6fd08c"),
    "blue": ("#0b57b0", "#86b9ff"),
    "purple": ("#6b3fa0", "#c9a6ff"),
}
BACKGROUND = ("#f6f8fa", "#161b22")
BORDER = ("#d0d7de", "#3d444d")
SANS = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif"
MONO = "ui-monospace, 'SFMono-Regular', 'DejaVu Sans Mono', 'Liberation Mono', monospace"


class Picture:
    """Collects elements and writes them as one SVG.

    Args:
        width: Width in pixels; a page may show the picture smaller.
        height: Height in pixels.
        title: What the picture shows, for readers of the screen.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.elements: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        color: str = "text",
        *,
        size: float = 14,
        anchor: str = "",
        style: str = "",
    ) -> None:
        """Adds a line of text; `style` is one or several of `mono` and `bold`."""
        where = f' text-anchor="{anchor}"' if anchor else ""
        names = f"{color} {style}".strip()
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" class="{names}" font-size="{size:g}"{where} xml:space="preserve">'
            f"{escape(words, quote=False)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, color: str = "faint", *, solid: bool = False
    ) -> None:
        """Adds a rectangle: its border, or a solid one in a weak tint of the color with its border."""
        kind = "tint" if solid else "line"
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{color} {kind}"/>'
        )

    def line(
        self, points: list[tuple[float, float]], color: str = "faint", *, arrow: bool = False, dashed: bool = False
    ) -> None:
        """Adds a line through points, with an arrow at its end if asked."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        more = (f' marker-end="url(#{color})"' if arrow else "") + (' stroke-dasharray="5 4"' if dashed else "")
        self.elements.append(f'<polyline points="{path}" class="{color} line"{more}/>')

    def dot(self, x: float, y: float, color: str, radius: float = 4) -> None:
        """Adds a filled circle."""
        self.elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="{color}"/>')

    def svg(self) -> str:
        """Returns the file."""
        arrows = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" class="{name}"/></marker>\n'
            for name in COLORS
            if f"url(#{name})" in "".join(self.elements)
        )
        body = "\n".join(self.elements)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" \
width="{self.width:g}" height="{self.height:g}" role="img" aria-label="{escape(self.title)}">
<title>{escape(self.title, quote=False)}</title>
<style>
{_rules(0)}
text {{ font-family: {SANS}; }}
.mono {{ font-family: {MONO}; }}
.bold {{ font-weight: 600; }}
.line {{ fill: none; stroke-width: 1.5; }}
.tint {{ fill-opacity: 0.14; stroke-width: 1.5; }}
@media (prefers-color-scheme: dark) {{
{_rules(1)}
.line {{ fill: none; }}
}}
</style>
<rect x="0.5" y="0.5" width="{self.width - 1:g}" height="{self.height - 1:g}" rx="8" class="page"/>
{f"<defs>{arrows}</defs>" if arrows else ""}
{body}
</svg>
"""


def _rules(scheme: int) -> str:
    rules = [f".page {{ fill: {BACKGROUND[scheme]}; stroke: {BORDER[scheme]}; }}"]
    for name, colors in COLORS.items():
        rules.append(f".{name} {{ fill: {colors[scheme]}; }}")
        rules.append(f".{name}.line, .{name}.tint {{ stroke: {colors[scheme]}; }}")
    return "\n".join(rules)
