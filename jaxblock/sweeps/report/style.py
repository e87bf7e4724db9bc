"""The page's style sheet: light, dark and paper, 380 px and up; no font and no image from outside."""

from collections.abc import Mapping

from jaxblock.sweeps.report.markup import Markup
from jaxblock.sweeps.report.palette import NIGHT, PAPER, SERIES_DARK, SERIES_LIGHT


def style_sheet() -> Markup:
    """Return the style sheet. It holds nothing that comes from a plan, so that nothing in it needs escaping."""
    light, dark = _variables(PAPER, SERIES_LIGHT), _variables(NIGHT, SERIES_DARK)
    series = "\n".join(f".s{i} {{ --c: var(--series-{i}); }}" for i in range(len(SERIES_LIGHT)))
    return Markup(
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"{series}\n{_PAGE}\n{_DRAWING}\n{_PAPER}"
    )


def _variables(named: Mapping[str, str], series: tuple[str, ...]) -> str:
    colors = {**named, **{f"series-{i}": color for i, color in enumerate(series)}}
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


_PAGE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--background); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif; }
main, header, footer { max-width: 1180px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 40px; }
h1 { font-size: clamp(1.6rem, 4vw, 2.3rem); line-height: 1.15; margin: 0 0 4px; letter-spacing: -0.01em;
  overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 56px 0 8px; padding-top: 20px; border-top: 1px solid var(--grid); }
h3 { font-size: 1.05rem; margin: 28px 0 4px; }
p, li, dd { max-width: 76ch; overflow-wrap: anywhere; }
a { color: var(--link); text-underline-offset: 2px; }
a:focus-visible, summary:focus-visible, .scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -9999px; }
.skip:focus { left: 12px; top: 8px; background: var(--raised); padding: 6px 10px; }
.facts { color: var(--quiet); margin: 0 0 24px; }
.answer { font-size: 1.12rem; margin: 0 0 16px; }
.answer strong { display: block; font-size: 0.82rem; color: var(--quiet); text-transform: uppercase;
  letter-spacing: 0.05em; }
.statuses { margin: 22px 0 0; padding: 0; list-style: none; color: var(--quiet); font-size: 0.9rem; display: grid;
  gap: 2px; }
.statuses li { display: grid; grid-template-columns: 5.6rem 1fr; gap: 12px; align-items: baseline; }
.short-answer { font-size: 1.02rem; margin: 0 0 8px; max-width: 100ch; }
.notes { color: var(--quiet); font-size: 0.88rem; margin: 4px 0 8px; padding-left: 20px; }
.notes li { max-width: 100ch; }
.verdicts { list-style: none; padding: 0; margin: 20px 0 0; display: grid; gap: 8px; }
.verdicts li { display: grid; grid-template-columns: 5.6rem 1fr; gap: 12px; align-items: baseline; max-width: 92ch; }
.word { font-size: 0.72rem; font-weight: 700; text-transform: uppercase; letter-spacing: 0.05em; text-align: center;
  border: 1px solid currentColor; border-radius: 4px; padding: 1px 4px; color: var(--quiet); }
.word.pass { color: var(--good); } .word.fail, .word.refused { color: var(--alarm); }
.refused-answer { border-left: 3px solid var(--alarm); padding-left: 12px; }
.box { background: var(--raised); border: 1px solid var(--grid); border-radius: 8px;
  padding: 14px 20px 8px; margin: 28px 0; }
.box h2 { border: 0; padding: 0; margin: 0 0 6px; font-size: 1.05rem; }
.box ul { padding-left: 20px; margin: 6px 0; } .box li { margin: 3px 0; max-width: 100ch; }
nav ol { columns: 3 17rem; column-gap: 2.5rem; padding-left: 24px; margin: 8px 0 0; font-size: 0.92rem; }
figure { margin: 0; }
figcaption { color: var(--quiet); font-size: 0.9rem; max-width: 92ch; margin-top: 8px; }
figcaption p { margin: 0 0 6px; }
figcaption ul { margin: 2px 0 6px; padding-left: 20px; }
figcaption > p > strong { color: var(--ink); }
@media (min-width: 1080px) {
  figure.alone { display: grid; grid-template-columns: 560px 1fr; column-gap: 32px; }
  figure.alone > .legend { grid-column: 1 / -1; } figure.alone > figcaption { margin-top: 24px; }
}
.panels { display: grid; gap: 18px 26px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 310px), 1fr)); }
.panels.one { grid-template-columns: minmax(0, 560px); }
.panels.two { grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 480px)); }
.panels.many > * { max-width: 460px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 0; margin: 8px 0 10px;
  font-size: 0.88rem; }
.legend li { display: flex; align-items: center; gap: 7px; }
.key { width: 18px; height: 16px; flex: none; }
.empty { color: var(--quiet); font-style: italic; }
details { margin: 10px 0; font-size: 0.9rem; }
summary { cursor: pointer; color: var(--link); width: fit-content; padding: 2px 0; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: 0.84rem; font-variant-numeric: tabular-nums; margin: 8px 0; }
caption { text-align: left; color: var(--quiet); padding-bottom: 4px; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  max-width: 46ch; }
td.long { overflow-wrap: anywhere; min-width: 12ch; }
td.n, th.n { text-align: right; white-space: nowrap; }
thead th { border-bottom: 1px solid var(--faint); font-weight: 600; vertical-align: bottom; }
footer { color: var(--quiet); font-size: 0.88rem; padding-top: 40px; padding-bottom: 60px; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 0.92em; overflow-wrap: anywhere; }
@media (max-width: 560px) {
  body { font-size: 15px; }
  main, header, footer { padding-left: 14px; padding-right: 14px; }
  .panels.one .panel text:not(.note) { font-size: 13px; }
  .verdicts li { grid-template-columns: 1fr; gap: 2px; } .word { justify-self: start; padding: 1px 8px; }
}"""
"""The text around the figures."""

_DRAWING = """
.panel { width: 100%; height: auto; display: block; overflow: visible; }
.panel text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--quiet); }
.panel .panel-title { font-weight: 600; font-size: 12.5px; fill: var(--ink); }
.panel .note, .panel .line-label { fill: var(--c); font-size: 10.5px; }
.panel .line-label { paint-order: stroke; stroke: var(--background); stroke-width: 3px;
  stroke-linejoin: round; }
.ink { --c: var(--ink); } .faint { --c: var(--faint); } .alarm { --c: var(--alarm); }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--faint); stroke-width: 1; }
.mark { fill: var(--c); fill-opacity: 0.85; stroke: var(--background); stroke-width: 0.6; }
.hollow { fill: var(--background); stroke: var(--c); stroke-width: 1.3; }
.line { fill: none; stroke: var(--c); stroke-width: 1.7; stroke-linejoin: round; }
.dashed { stroke-dasharray: 5 3; } .dotted { stroke-dasharray: 1.5 3; }
.whisker { stroke: var(--c); stroke-width: 1.7; fill: none; }
.cross { stroke: var(--c); stroke-width: 2; fill: none; }
.void { stroke: var(--c); stroke-width: 1.4; fill: none; }
.bar { fill: var(--c); fill-opacity: 0.85; }
.thin { stroke-width: 0.8; opacity: 0.35; }
.pale { opacity: 0.55; }"""
"""What `svg` draws; the color of a mark is --c of its group."""

_PAPER = """
@media print {
  @page { size: A4; margin: 15mm 14mm; }
  :root { color-scheme: light; }
  body { font-size: 9.5pt; }
  main, header, footer { max-width: none; padding: 0; }
  nav, .skip { display: none; }
  h1, h2, h3 { break-after: avoid; } h2 { margin-top: 12pt; padding-top: 8pt; font-size: 12pt; }
  figure > .panels > svg, .verdicts li, .box li, tr, figcaption { break-inside: avoid; }
  .panels, .panels.two { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10pt 14pt; }
  .panels.many { grid-template-columns: repeat(3, minmax(0, 1fr)); }
  .panels.one { grid-template-columns: minmax(0, 95mm); }
  figcaption, p, li, dd, .verdicts li { max-width: none; }
  details.data { display: none; }
  details:not([open])::details-content { content-visibility: visible; height: auto; }
  summary { color: inherit; list-style: none; } summary::-webkit-details-marker { display: none; }
  figcaption, details { font-size: 8pt; } .legend { font-size: 8pt; }
  .answer { font-size: 11pt; }
  .scroll { overflow: visible; }
  table { width: 100%; font-size: 6.5pt; }
  th, td { padding: 2px 7px 2px 0; }
  th.n { white-space: normal; }
  section.figure { break-inside: avoid; }
  thead { display: table-header-group; }
  a { color: inherit; text-decoration: none; }
}"""
"""Paper is white; the data behind figures stays in the CSV files, every other table is printed whole."""
