"""The style of t5x_gpu's pages: light and dark, wide and narrow, and on paper."""

# Okabe and Ito's colors, which color-blind readers can distinguish; lighter on a dark page.
_LIGHT = (
  '#0072b2',
  '#d55e00',
  '#009e73',
  '#b85c93',
  '#c98a00',
  '#3a9bd9',
  '#7257b5',
  '#8a8f98',
  '#3f4754',
  '#b3a07f',
)
_DARK = (
  '#5cb3f5',
  '#ff935c',
  '#3fd0a4',
  '#ec9fcb',
  '#f5bd4a',
  '#9ad6ff',
  '#b9a3f0',
  '#8d949e',
  '#5d6878',
  '#d6c39c',
)


def _variables(colors: tuple[str, ...]) -> str:
  return ''.join(f'--c{i}:{color};' for i, color in enumerate(colors))


def _classes() -> str:
  return ''.join(
    f'.c{i}{{stroke:var(--c{i})}}.b{i}{{background:var(--c{i})}}.f{i}{{fill:var(--c{i})}}'
    for i in range(len(_LIGHT))
  )


_VIEWS = ''.join(
  f'.views>input:nth-of-type({i}):checked~.view:nth-of-type({i}){{display:block}}'
  for i in range(1, 5)
)

STYLE = (
  ':root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1b2430;--dim:#5b6675;'
  '--edge:#dde2e9;--grid:#e6eaf0;--accent:#0b62a8;--good:#0a7d55;--bad:#c23b22;--shade:#0b62a814;'
  + _variables(_LIGHT)
  + '}@media(prefers-color-scheme:dark){:root{--page:#12161c;--card:#1a2029;--text:#e6eaf0;'
  '--dim:#98a3b2;--edge:#2c3542;--grid:#29313d;--accent:#6cb8ff;--good:#3fd0a4;--bad:#ff8a70;'
  '--shade:#6cb8ff1f;' + _variables(_DARK) + '}}'
  """
*{box-sizing:border-box}
html{scroll-behavior:smooth;scroll-padding-top:3.4rem;-webkit-text-size-adjust:100%}
@media(prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--page);color:var(--text);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif}
header,main,footer{max-width:68rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:1.75rem}
h1{font-size:1.6rem;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 .35rem}
h3{font-size:1rem;margin:1.25rem 0 .35rem}
p{margin:.35rem 0}
.subtitle,.intro,.note,footer{color:var(--dim)}
.subtitle{overflow-wrap:anywhere}
.note{font-size:.875rem}
footer{font-size:.8125rem;padding-bottom:2.5rem}
a{color:var(--accent)}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px;border-radius:3px}
.skip{position:absolute;left:-999rem}
.skip:focus{left:1rem;top:.5rem;background:var(--card);padding:.25rem .75rem;z-index:3}
nav{position:sticky;top:0;z-index:2;background:var(--page);border-bottom:1px solid var(--edge);
  margin-top:1rem}
nav ul{max-width:68rem;margin:0 auto;padding:0 1.25rem;display:flex;gap:1.1rem;list-style:none;
  overflow-x:auto;scrollbar-width:none}
nav a{display:block;padding:.6rem 0;white-space:nowrap;text-decoration:none;font-size:.9rem;
  color:var(--dim)}
nav a:hover,nav a:focus{color:var(--accent)}
section{background:var(--card);border:1px solid var(--edge);border-radius:12px;
  padding:1.1rem 1.25rem 1.25rem;margin:1.1rem 0;min-width:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.75rem;
  margin-top:1.25rem}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:.7rem .9rem;
  min-width:0}
.tile-name{font-size:.8125rem;color:var(--dim)}
.tile-value{font-size:1.45rem;font-weight:650;line-height:1.25;overflow-wrap:anywhere;
  font-variant-numeric:tabular-nums}
.tile-note{font-size:.8125rem;color:var(--dim);overflow-wrap:anywhere}
.good{color:var(--good)}.bad{color:var(--bad)}
.notes{list-style:none;margin:1.1rem 0 0;padding:.6rem 1rem;border-radius:12px;
  border:1px solid var(--c4);background:var(--card)}
.notes li{margin:.2rem 0;overflow-wrap:anywhere}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr));
  gap:0 1.5rem}
.scroll{overflow-x:auto;margin-top:.5rem}
table{border-collapse:collapse;font-size:.875rem;min-width:100%}
caption{text-align:left;color:var(--dim);padding-bottom:.25rem}
th,td{text-align:left;padding:.32rem .9rem .32rem 0;border-bottom:1px solid var(--edge);
  vertical-align:top}
th{font-weight:600;color:var(--dim);white-space:nowrap}
tbody tr:last-child td{border-bottom:0}
td{max-width:26rem;overflow-wrap:break-word}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
  font-size:.8125rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--page);border:1px solid var(--edge);
  border-radius:8px;padding:.7rem .9rem;margin:.5rem 0;max-height:24rem;overflow-y:auto}
details{margin-top:.6rem;font-size:.9rem}
summary{cursor:pointer;color:var(--dim);width:max-content;max-width:100%}
summary:hover{color:var(--accent)}
figure{margin:.9rem 0 0;min-width:0}
figcaption{font-weight:600;font-size:.95rem}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;list-style:none;margin:.25rem 0;padding:0;
  font-size:.8125rem;color:var(--dim)}
.legend li{display:flex;align-items:center;gap:.4rem;min-width:0;overflow-wrap:anywhere}
.key.pale{opacity:.45}
.key.dashed{background-image:repeating-linear-gradient(90deg,#0000 0 3px,var(--card) 3px 5px)}
.key{width:.75rem;height:.75rem;border-radius:3px;flex:none}
.plot{position:relative;height:15rem;margin:.6rem .9rem 1.5rem var(--gutter,3rem);
  border-bottom:1px solid var(--edge)}
.plot svg{display:block;width:100%;height:100%;overflow:visible}
.plot path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--grid);stroke-width:1}
.mark{stroke:var(--dim);stroke-width:1;stroke-dasharray:2 4}
.plot .limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:6 4}
.line{stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.pale{stroke-width:1;opacity:.4}
.dashed{stroke-dasharray:6 5}
.plot .p1{stroke-dasharray:12 4}
.plot .p2{stroke-dasharray:2 5}
.plot .p3{stroke-dasharray:12 4 2 4}
.spots{stroke-width:7;stroke-linecap:round}
.hover{fill:transparent}
.hover:hover{fill:var(--shade)}
.y-tick,.x-tick,.x-label,.y-label{font-size:.75rem;color:var(--dim);
  font-variant-numeric:tabular-nums}
.y-tick{position:absolute;right:100%;transform:translateY(-50%);padding-right:.5rem;
  white-space:nowrap}
.x-tick{position:absolute;top:100%;transform:translateX(-50%);padding-top:.25rem;
  white-space:nowrap}
.x-label{text-align:right;margin:-.2rem .9rem 0 0}
.bars{display:grid;grid-template-columns:minmax(4rem,max-content) 1fr max-content;
  gap:.45rem .75rem;align-items:center;margin-top:.5rem;font-size:.875rem}
.bar-row{display:contents}
.bar-name{overflow-wrap:anywhere;max-width:14rem}
.bar{position:relative;display:flex;height:1.35rem;border-radius:5px;overflow:hidden;
  background:var(--grid)}
.bar span{height:100%;min-width:1px}
.bar span+span:not(.limit){border-left:1px solid var(--card)}
.bar .limit{position:absolute;border-left:2px solid var(--bad)}
i.p1,span.p1{background-image:repeating-linear-gradient(45deg,#0000 0 4px,var(--card) 4px 6px)}
i.p2,span.p2{background-image:repeating-linear-gradient(135deg,#0000 0 4px,var(--card) 4px 6px)}
i.p3,span.p3{background-image:repeating-linear-gradient(90deg,#0000 0 4px,var(--card) 4px 6px)}
.bar-total{font-variant-numeric:tabular-nums;white-space:nowrap}
.hosts{display:grid;grid-template-columns:repeat(auto-fill,minmax(13rem,1fr));gap:.75rem;
  margin-top:.6rem}
.host{display:block;width:100%;height:auto;max-width:22rem}
.host text{font-size:15px;fill:var(--text)}
.host .on{fill:#fff;text-anchor:middle;font-weight:600}
.host .small{font-size:12px;fill:var(--dim)}
.host .case{fill:var(--page);stroke:var(--edge)}
.wire{fill:none;stroke:var(--grid);stroke-width:3}
.wire.used{stroke:var(--accent);stroke-width:5}
.views{margin-top:.6rem}
.views>input{position:absolute;opacity:0}
.views>label{display:inline-block;font-size:.8125rem;padding:.15rem .7rem;border-radius:99px;
  border:1px solid var(--edge);color:var(--dim);cursor:pointer;margin-right:.35rem}
.views>input:checked+label{background:var(--accent);border-color:var(--accent);color:var(--card)}
.views>input:focus-visible+label{outline:2px solid var(--accent);outline-offset:2px}
.view{display:none}
@media(max-width:34rem){
  header,main,footer,nav ul{padding-left:.8rem;padding-right:.8rem}
  section{padding:.9rem .9rem 1rem}
  h1{font-size:1.3rem}
  .tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:.5rem}
  .tile-value{font-size:1.2rem}
  .plot{height:12rem}
  td:not(.number){min-width:6.5rem}
  td:last-child:not(.number){min-width:10rem}
  .hosts{grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:.5rem}
  .bars{grid-template-columns:1fr}
  .bar-row{display:grid;grid-template-columns:1fr max-content;gap:.1rem .5rem}
  .bar-name{max-width:none}
  .bar{grid-row:2;grid-column:1/-1}
  .x-tick:nth-of-type(even){visibility:hidden}
}
@media print{nav{position:static}section,.tile{break-inside:avoid}}
""" + _classes() + _VIEWS
)
