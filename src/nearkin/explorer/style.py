"""How pages look: quiet, in the reader's own fonts, by day and by night."""

from typing import Final

SHADES: Final = 10
"""Steps from an empty cell to a full one."""

_RULES: Final = """
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --card: #fff; --ink: #1d2126; --soft: #5b636d; --rule: #dcdfe3;
  --accent: #1f5aa0; --alert: #a34a00; --alert-paper: #fff5e8; --shade: 31 90 160;
  --line0: #0072b2; --line1: #c24e00; --line2: #00795a; --line3: #a8497f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --card: #1b1f24; --ink: #e4e7ea; --soft: #9fa8b2; --rule: #343b43;
    --accent: #85b7f2; --alert: #ffb469; --alert-paper: #2a2218; --shade: 60 130 220;
    --line0: #56b4e9; --line1: #ff9d4d; --line2: #35c79a; --line3: #e29ac4;
  }
}
* { box-sizing: border-box }
body {
  margin: 0 auto; max-width: 68rem; padding: 2.5rem 1.25rem 6rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 2.1rem; line-height: 1.2; margin: .2rem 0 1rem; text-wrap: balance }
h2 { font-size: 1.35rem; margin: 3.5rem 0 .75rem; padding-top: 1rem;
  border-top: 1px solid var(--rule) }
h3 { font-size: 1.1rem; margin: 0 0 .75rem }
* + h3 { margin-top: 2rem }
h4 { font-size: .9rem; margin: 1.25rem 0 .4rem }
h4 + .note { margin-top: -.3rem }
p, li { max-width: 44rem }
.lead { font-size: 1.15rem }
.kicker, .note, .tiles span, caption, figcaption { color: var(--soft) }
.kicker { margin: 0; font-size: .9rem }
.note { font-size: .9rem; margin: .25rem 0 .75rem }
a { color: var(--accent) }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px }
nav ul, .tiles, .overview, .legend, .findings { list-style: none; margin: 0; padding: 0 }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.25rem; margin-top: 1.5rem }
.findings li {
  max-width: none; margin: .5rem 0; padding: .65rem 1rem; border-left: 4px solid var(--alert);
  background: var(--alert-paper);
}
.findings b { color: var(--alert) }
img { display: block; width: 100%; height: auto; aspect-ratio: 1; background: var(--rule);
  border-radius: 3px; outline: 1px solid rgb(128 128 128 / .3); outline-offset: -1px }
.tiny img { image-rendering: pixelated }
.overview { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr));
  gap: 1rem; margin: 1rem 0 2rem }
.overview a { display: block; text-decoration: none; line-height: 1.3 }
.overview b { display: block; margin-top: .3rem }
.overview span { color: var(--soft); font-size: .85rem }
.class > h3, .chart > h3 { margin-top: 0 }
.class, .chart { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 1.25rem; margin: 1.25rem 0 }
.about { display: grid; grid-template-columns: 11rem 1fr; gap: 1.5rem; align-items: start }
figure { margin: 0 }
figcaption { font-size: .8rem; line-height: 1.35; margin-top: .35rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(5.25rem, 1fr));
  gap: .5rem }
.tiny .tiles { grid-template-columns: repeat(auto-fill, minmax(4rem, 1fr)) }
.tiles span { display: block; text-align: center; font-size: .75rem }
.tiles span, td, svg { font-variant-numeric: tabular-nums }
.wide { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-size: .92rem; overflow-wrap: normal }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
.matrix caption { position: static; width: auto; height: auto; clip-path: none; text-align: left;
  padding-bottom: .4rem }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule) }
th { font-weight: 600 }
.numbers { width: 100% }
.numbers th { font-weight: 400; color: var(--soft); white-space: nowrap }
.numbers td { font-weight: 600 }
.numbers td + td { font-weight: 400; color: var(--soft); font-size: .85rem; width: 60% }
.matrix th, .matrix td { padding: .3rem .6rem; text-align: center;
  border: 1px solid var(--rule) }
.matrix tbody th { text-align: right }
details { margin: .75rem 0 }
summary { cursor: pointer; color: var(--accent) }
summary h3 { display: inline; font-size: 1rem }
details.class[open] > summary { margin-bottom: 1rem }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 6px;
  padding: .75rem 1rem; white-space: pre-wrap; font-size: .88rem }
.chart { max-width: 46rem }
.chart > svg { display: block; width: 100%; height: auto; overflow: visible }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; font-size: .9rem;
  margin-bottom: .5rem }
.legend svg { margin-right: .5rem; vertical-align: middle }
.axis { fill: var(--soft); font-size: 12px }
.grid { stroke: var(--rule) }
.band { fill: rgb(var(--shade) / .14) }
line.mark { stroke: var(--ink); stroke-dasharray: 3 3 }
text.mark { fill: var(--ink); font-size: 12px; font-weight: 600 }
.line { fill: none; stroke-width: 2; stroke-linejoin: round }
.line0 { stroke: var(--line0) } .dot0 { fill: var(--line0) }
.line1 { stroke: var(--line1); stroke-dasharray: 7 3 } .dot1 { fill: var(--line1) }
.line2 { stroke: var(--line2); stroke-dasharray: 2 3 } .dot2 { fill: var(--line2) }
.line3 { stroke: var(--line3); stroke-dasharray: 9 3 2 3 } .dot3 { fill: var(--line3) }
@media (max-width: 40rem) {
  .about { grid-template-columns: 1fr }
  .about figure { max-width: 11rem }
  .numbers tr { display: grid; grid-template-columns: 7.5rem 1fr }
  .numbers th, .numbers td { border: 0 }
  .numbers td + td { grid-column: 2; width: auto; padding-top: 0 }
}
@media print { .class { break-inside: avoid } body { max-width: none } }
"""

STYLE: Final = _RULES + "".join(
    f".shade{step} {{ background: rgb(var(--shade) / {0.07 * step:.2f}) }}\n"
    for step in range(1, SHADES + 1)
)
