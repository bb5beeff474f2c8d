"""The pages' style sheets: one calm column, figures of equal width, light, dark, narrow and printed."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--paper:#fcfcfa;--ink:#1c1f23;--soft:#666c74;--hair:#e3e3dd;--block:#f3f3ee;
--train:#2d63ad;--valid:#c65a17;--right:45,99,173;--wrong:214,84,28}
@media screen and (prefers-color-scheme:dark){:root{--paper:#15171a;--ink:#e7e7e3;--soft:#989fa8;--hair:#2c3036;
--block:#1c1f23;--train:#7fadf0;--valid:#f2955a;--right:88,146,226;--wrong:240,112,56}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:400 1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans",sans-serif;
font-variant-numeric:tabular-nums lining-nums}
main{max-width:66rem;margin:0 auto;padding:clamp(2rem,7vw,5.5rem) clamp(1rem,4vw,3rem) 5rem}
h1,h2,h3,p,figure,ul,dl,dd,pre{margin:0;padding:0}
h2{font-size:1.5rem;font-weight:600;letter-spacing:-.015em;margin-bottom:1.5rem}
h3{display:inline;font-size:1rem;font-weight:600}
b{font-weight:600}
i{font-style:normal}
section{margin-top:clamp(3rem,7vw,5rem);padding-top:2rem;border-top:1px solid var(--hair)}
code,pre{font:400 .8125rem/1.7 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{overflow-wrap:anywhere}
.quiet{color:var(--soft);font-size:.875rem}

.over{color:var(--soft);font-size:.875rem;overflow-wrap:anywhere;letter-spacing:.04em}
h1{font-size:clamp(4rem,15vw,8.5rem);font-weight:300;line-height:1.05;letter-spacing:-.045em;
font-variant-numeric:proportional-nums lining-nums;text-indent:-.04em;margin:.1em 0 .12em}
h1 small{font-size:.42em;letter-spacing:0;color:var(--soft)}
h1 span{display:block;font-size:1.25rem;font-weight:600;letter-spacing:-.01em;line-height:1.4;text-indent:0}
.wrongs{font-size:1.25rem;color:var(--soft);letter-spacing:-.01em}
.wrongs b{color:var(--ink)}
.ran{margin-top:1.5rem;color:var(--soft)}
.ran span{display:inline-block;color:var(--ink);overflow-wrap:anywhere;min-width:0;max-width:100%}
.ran i{color:var(--soft)}

.plot{margin-bottom:2.25rem}
.plot+.quiet{margin-top:-1rem}
.plot figcaption{display:flex;flex-wrap:wrap;align-items:baseline;gap:.15rem .6rem}
.unit{color:var(--soft);font-size:.875rem}
.legend{margin-left:auto;display:flex;flex-wrap:wrap;gap:.15rem 1.4rem;font-size:.875rem}
.key{white-space:nowrap;color:var(--soft)}
.key b{color:var(--ink)}
.key i{display:inline-block;width:1.1rem;height:0;border-top:2.5px solid;vertical-align:.28em;margin-right:.45rem}
.key.train i{color:var(--train)}
.key.valid i{color:var(--valid)}
.key.rate i{color:var(--soft)}
.key.test i{width:.6rem;height:.6rem;border:0;background:var(--ink);transform:rotate(45deg);vertical-align:0}
.frame{padding:1rem 1.2rem 3.4rem 3.9rem}
.tall{height:20rem}
.low{height:10rem}
.frame>svg{display:block;overflow:visible}
.rule{stroke:var(--hair)}
.epoch{stroke:var(--soft);stroke-dasharray:1 4;opacity:.8}
text{fill:var(--soft);font-size:.75rem}
text.y,text.name{text-anchor:end}
text.x{text-anchor:middle}
.line{fill:none;stroke-width:1.75;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.line.train,.band.train{stroke:var(--train)}
.line.valid,.band.valid{stroke:var(--valid)}
.line.rate{stroke:var(--soft)}
.band{stroke:none!important;opacity:.22}
.band.train,.dot.train{fill:var(--train)}
.band.valid,.dot.valid{fill:var(--valid)}
.band.rate,.dot.rate{fill:var(--soft)}
.dot{stroke:var(--paper);stroke-width:1.5}
.mark{overflow:visible}
.mark path{fill:var(--ink);stroke:var(--paper);stroke-width:1.5}

.confusion{display:grid;gap:2.5rem 4rem}
.confusion>*{min-width:0}
.scroll{overflow:auto;max-height:85vh;max-width:max-content}
.matrix{border-collapse:separate;border-spacing:2px;text-align:center;line-height:1.2;font-size:.875rem}
.matrix caption{text-align:left;color:var(--soft);font-size:.875rem;padding-bottom:.6rem}
.matrix th{font-weight:600;background:var(--paper);padding:.2rem .4rem}
.matrix tbody th{position:sticky;left:0;text-align:right;white-space:nowrap}
.matrix thead th{position:sticky;top:0;z-index:1;vertical-align:bottom}
.matrix thead td{position:sticky;left:0;top:0;z-index:2;background:var(--paper)}
.turned span{writing-mode:vertical-rl;transform:rotate(180deg);white-space:nowrap}
.matrix tbody td{height:2.6rem;min-width:2.7rem;border-radius:3px}
.matrix .right{background:rgba(var(--right),calc(.08 + .34*var(--shade)));font-weight:600}
.matrix .wrong{background:rgba(var(--wrong),calc(.08 + .5*var(--shade)))}
.matrix .none{color:var(--soft);opacity:.45}
.small .matrix{font-size:.6875rem;border-spacing:1px}
.small .matrix tbody td{height:1.5rem;min-width:1.6rem;border-radius:2px}
.small .matrix th{padding:.1rem .25rem}
.scale{display:flex;flex-wrap:wrap;gap:.2rem 1.5rem;margin-top:.9rem;font-size:.875rem;color:var(--soft)}
.scale i{display:inline-block;width:3.5rem;height:.7rem;border-radius:2px;margin-right:.5rem}
.scale .right i{background:linear-gradient(90deg,rgba(var(--right),.08),rgba(var(--right),.42))}
.scale .wrong i{background:linear-gradient(90deg,rgba(var(--wrong),.08),rgba(var(--wrong),.58))}
.pairs{margin-top:.9rem;font-size:.875rem;color:var(--soft);max-width:34rem}
.pairs b{color:var(--ink)}
.classes ul{list-style:none;margin-top:.8rem}
.classes li{display:grid;grid-template-columns:max(1.2rem,min(var(--longest),9rem)) 4.6rem 1fr 6.2rem;gap:.9rem;
align-items:center;padding:.42rem 0;border-bottom:1px solid var(--hair);break-inside:avoid;white-space:nowrap}
.who{overflow:hidden;text-overflow:ellipsis}
.classes li b{font-weight:400;text-align:right}
.classes li .quiet{text-align:right}
.bar{height:.4rem;border-radius:.2rem;background:var(--block)}
.bar i{display:block;height:100%;border-radius:.2rem;background:rgb(var(--wrong))}
.bar.good i{background:rgb(var(--right))}
.small .classes ul{columns:19rem;column-gap:3rem}
@media (min-width:58rem){.large{grid-template-columns:max-content 1fr}.large .classes{padding-top:2rem}}

.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(6.2rem,1fr));gap:1.6rem 1.2rem;margin-top:1.5rem}
.mistake{break-inside:avoid;min-width:0}
.mistake img{display:block;width:100%;height:auto;aspect-ratio:1;image-rendering:pixelated;border-radius:4px;
background:#fff;border:1px solid var(--hair)}
.mistake figcaption{margin-top:.5rem;font-size:.8125rem;line-height:1.45}
.mistake figcaption>*{display:block}
.mistake b{font-size:1.0625rem;overflow-wrap:anywhere}
.mistake b i{color:var(--soft);font-weight:400}
.mistake em{display:inline-block;font-style:normal;color:var(--valid)}
.mistake .quiet{font-size:.8125rem}

.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,16rem),1fr));gap:0 3.5rem}
.block{margin-bottom:2.75rem;min-width:0}
.block h3{display:block;margin-bottom:.5rem}
.block dl div{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 1.5rem;padding:.42rem 0;
border-bottom:1px solid var(--hair);break-inside:avoid}
.block dt{color:var(--soft);min-width:0;overflow-wrap:anywhere}
.block dd{text-align:right;margin-left:auto;min-width:0;overflow-wrap:anywhere}
.origin dl div{flex-wrap:nowrap}
.origin dt{flex:0 0 10rem}
.origin dd{text-align:left;flex:1}
.yaml{columns:18rem;column-gap:2.5rem;background:var(--block);border-radius:6px;padding:1.2rem 1.4rem}
.yaml pre{white-space:pre-wrap;overflow-wrap:anywhere;break-inside:avoid;padding-bottom:1rem}

@media (max-width:40rem){
.legend{margin-left:0;flex-basis:100%}
.tall{height:17rem}
.large .matrix{font-size:.75rem;border-spacing:1px}
.large .matrix tbody td{height:1.9rem;min-width:1.85rem}
.matrix th{padding:.1rem .25rem}
.gallery{grid-template-columns:repeat(auto-fill,minmax(5rem,1fr))}
.classes li{gap:.6rem;grid-template-columns:max(1.2rem,min(var(--longest),7rem)) 4.4rem 1fr 6rem}
.origin dl div{flex-wrap:wrap}
.origin dd{flex-basis:100%}}
@media print{
@page{margin:16mm}
:root{--paper:#fff}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
html{font-size:11px}
main{max-width:none;padding:0}
section{margin-top:2rem;padding-top:1.5rem}
h1{font-size:6rem}
h2,h3{break-after:avoid}
.plot{margin-bottom:1.2rem}
.tall{height:15rem}
.large{grid-template-columns:max-content 1fr}
.plot,.matrix,.scale,.block,.large{break-inside:avoid}
.scroll{overflow:visible;max-height:none}
.matrix th{position:static}
.small .matrix{font-size:5px;border-spacing:0}
.small .matrix tbody td{height:1em;min-width:0;padding:0}}
"""

COMPARISON_STYLE = (
    STYLE
    + """
:root{--c2:#1f7a4d;--c3:#8a4fb0;--c4:#b03a5b;--c5:#7a6a1d}
@media screen and (prefers-color-scheme:dark){:root{--c2:#66c496;--c3:#c393e6;--c4:#f07f9e;--c5:#cdbb62}}
h1.bad,.cells .bad{color:var(--valid)}
.notes{font-size:1.25rem;color:var(--soft);letter-spacing:-.01em}
.said{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.scroll{position:relative}
.cells{border-collapse:separate;border-spacing:0;font-size:.875rem;line-height:1.35;text-align:left}
main{max-width:70rem}
.cells th,.cells td{padding:.5rem .55rem;border-bottom:1px solid var(--hair);vertical-align:top}
.cells thead th{position:sticky;top:0;z-index:1;vertical-align:bottom;font-weight:400;color:var(--soft)}
.cells th{background:var(--paper)}
.cells th:first-child{position:sticky;left:0;padding-left:0;min-width:9rem;max-width:13rem;overflow-wrap:break-word}
.cells.who th:first-child{max-width:20rem}
.cells thead th:first-child{z-index:2}
.cells .whole{display:inline-block}
.cells tbody th{font-weight:600}
.cells small{display:block;color:var(--soft);font-size:.75rem;font-weight:400}
.cells .figure{text-align:right}
.cells td.figure,.cells .hash{white-space:nowrap}
.cells td.mark,.cells th.mark{text-align:center}
.cells .bad{font-weight:600}
.cells .soft{color:var(--soft)}
.cells td.hash{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.8125rem}
.cells .word{white-space:nowrap}
.cells .bar{display:block;width:6rem;margin:.35rem 0 .2rem auto}
.cells .bar i{background:var(--train)}
.cells .parts small{min-width:6.5rem;white-space:normal}
.keys,.method{margin-top:.9rem}
.method{margin:0 0 1rem}
.keys span{display:inline-block;margin-right:1.2rem}
.keys b{color:var(--ink)}
.keys.apart span{display:block;margin:0;max-width:52rem}
h3.first{display:block;margin:2.25rem 0 .5rem}
.firsts{list-style:none}
.firsts li{padding:.42rem 0;border-bottom:1px solid var(--hair);overflow-wrap:anywhere;white-space:pre-line}
.firsts b{margin-right:.6rem}
.firsts code{display:block}
.key{white-space:normal;overflow-wrap:anywhere}
.legend{margin-left:0;flex-basis:100%}
.key.c0 i,.line.c0{color:var(--train);stroke:var(--train)}
.key.c1 i,.line.c1{color:var(--valid);stroke:var(--valid)}
.key.c2 i,.line.c2{color:var(--c2);stroke:var(--c2)}
.key.c3 i,.line.c3{color:var(--c3);stroke:var(--c3)}
.key.c4 i,.line.c4{color:var(--c4);stroke:var(--c4)}
.key.c5 i,.line.c5{color:var(--c5);stroke:var(--c5)}
.line.c1,.line.c3,.line.c5{stroke-dasharray:9 7}
.line.c2,.line.c4{stroke-dasharray:2 5}
.key.c1 i,.key.c3 i,.key.c5 i{border-top-style:dashed}
.key.c2 i,.key.c4 i{border-top-style:dotted}
.band.c0,.dot.c0{fill:var(--train)}
.band.c1,.dot.c1{fill:var(--valid)}
.band.c2,.dot.c2{fill:var(--c2)}
.band.c3,.dot.c3{fill:var(--c3)}
.band.c4,.dot.c4{fill:var(--c4)}
.band.c5,.dot.c5{fill:var(--c5)}
@media (max-width:40rem){.cells th:first-child,.cells.who th:first-child{max-width:9.5rem}
.cells th,.cells td{padding:.45rem .5rem}}
@media print{.cells{font-size:8px}.cells small{font-size:7px}.cells th,.cells td{padding:.3em .5em}
.cells thead th,.cells th:first-child{position:static}}
"""
)
