"""The style sheet of the HTML report: scoped to ``.flatout``, light and dark, notebooks included."""

_LIGHT = (
    "--ink:#1c2024;--soft:#5b6570;--line:#dfe3e8;--paper:#fff;--lift:#f6f7f9;--kept:#1a7f37;--rejected:#9a6700;"
    "--advice:#0969da;--untried:#6e5bc7;--load:#d9822b;--step:#3f6fd1;--inside:#fff;--whisker:#1c2024"
)
_DARK = (
    "--ink:#e6e9ed;--soft:#9aa4af;--line:#31373f;--paper:#14171b;--lift:#1c2026;--kept:#4cc26b;--rejected:#d4a72c;"
    "--advice:#58a6ff;--untried:#a999f5;--load:#e39a4d;--step:#6f97ea;--inside:#0d1014;--whisker:#e6e9ed"
)

STYLE = (
    f"""
.flatout{{{_LIGHT};color:var(--ink);background:var(--paper);text-align:left;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;max-width:1040px;padding:8px 20px}}
@media (prefers-color-scheme:dark){{.flatout-page,.flatout-page .flatout{{{_DARK}}}}}
[data-jp-theme-light="false"] .flatout,body.vscode-dark .flatout,html[theme="dark"] .flatout{{{_DARK}}}
.flatout-page{{margin:0;{_LIGHT};background:var(--paper)}}
@media (prefers-color-scheme:dark){{.flatout-page{{{_DARK}}}}}
.flatout-page>.flatout{{margin:0 auto;padding:28px 24px 60px}}
"""
    + """
.flatout section+section,.flatout .job+.job{margin-top:56px;padding-top:24px;border-top:2px solid var(--line)}
.flatout h1{font-size:26px;line-height:1.25;font-weight:600;margin:8px 0;color:inherit}
.flatout .job section{margin-top:30px}.flatout .job section h1{font-size:19px}
.flatout .job section .factor{font-size:26px}
.flatout h2{font-size:17px;font-weight:600;margin:34px 0 10px;color:inherit}
.flatout .factor{font-weight:600;color:var(--kept);font-size:40px;font-variant-numeric:tabular-nums}
.flatout .lead{margin:0 0 12px;color:var(--soft);font-size:16px}
.flatout .quiet{color:var(--soft);font-size:13px}
.flatout svg{width:100%;max-width:860px;height:auto;display:block;font-family:inherit}
.flatout svg text{font-size:12.5px;fill:var(--ink)}
.flatout svg .axis,.flatout svg .value{fill:var(--soft);font-size:11.5px;font-variant-numeric:tabular-nums}
.flatout svg .inside{fill:var(--inside);font-weight:600}
.flatout .tick{stroke:var(--line)}.flatout .zero{stroke:var(--soft)}
.flatout .whisker{stroke:var(--whisker);stroke-width:1.2;fill:none;opacity:.75}
.flatout rect.kept{fill:var(--kept)}.flatout rect.rejected{fill:var(--rejected);opacity:.6}
.flatout rect.step,.flatout rect.whole{fill:var(--step)}.flatout rect.rest{fill:var(--soft);opacity:.6}
.flatout .thread{stroke:var(--soft);fill:none}
.flatout .key{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 3px 0 10px}
.flatout .key:first-child{margin-left:0}
.flatout table{border-collapse:collapse;width:100%;font-size:14px;color:inherit;table-layout:auto}
.flatout thead th{font-weight:600;font-size:12.5px;color:var(--soft);text-align:left;
border-bottom:1px solid var(--line)}
.flatout th,.flatout td{padding:9px 12px 9px 0;vertical-align:top;text-align:left;background:none;white-space:normal}
.flatout tbody tr{border-top:1px solid var(--line);background:none}
.flatout td.number{color:var(--soft);width:22px;text-align:right;font-variant-numeric:tabular-nums}
.flatout td.technique{font-weight:600;min-width:130px}.flatout tr.na td.technique{font-weight:400}
.flatout tr.na{color:var(--soft)}
.flatout .chosen{font-weight:400;font-size:13px;color:var(--kept)}
.flatout td.reason{width:45%}.flatout .quiet+.why{margin-top:4px}
.flatout .why{white-space:pre-line;overflow-wrap:anywhere}
.flatout td.gain{white-space:nowrap;font-variant-numeric:tabular-nums}
.flatout td.gain span{font-size:12px;color:var(--soft)}
.flatout .pill{display:inline-block;white-space:nowrap;border-radius:999px;padding:1px 10px;font-size:12.5px;
border:1px solid var(--line);color:var(--soft);background:var(--lift)}
.flatout .pill.kept{color:var(--kept);border-color:currentColor}
.flatout .pill.rejected{color:var(--rejected)}
.flatout .pill.advice{color:var(--advice)}.flatout .pill.untried{color:var(--untried)}
.flatout details{margin-top:4px;color:var(--soft);font-size:13px}.flatout details summary{cursor:pointer}
.flatout details ul,.flatout section ul{margin:6px 0;padding-left:20px}
.flatout footer{margin-top:28px;padding-top:12px;border-top:1px solid var(--line)}
.flatout .versus{max-width:860px}.flatout .versus td{font-variant-numeric:tabular-nums}
"""
)
