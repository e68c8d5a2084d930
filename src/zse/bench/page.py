"""Reports side by side as one static page: inline SVG, no script, nothing that is loaded from elsewhere.

The reports stand in the order given, as an ablation is read: each adds one optimization to the one before, and every
bar says what it is worth beside the first.
"""

from html import escape

from zse.bench.reports import figure

# (figure, title, whether more is better)
CHARTS = (
    ("output_tok_per_s", "Output tokens a second", True),
    ("requests_per_s", "Requests a second", True),
    ("ttft_ms.p50", "TTFT p50, ms", False),
    ("ttft_ms.p95", "TTFT p95, ms", False),
    ("itl_ms.p50", "ITL p50, ms", False),
    ("itl_ms.p95", "ITL p95, ms", False),
    ("itl_ms.p99", "ITL p99, ms", False),
    ("e2e_ms.p95", "End to end p95, ms", False),
)
_COLORS = ("#3b6fb6", "#c8702a", "#3f8f5b", "#9a4fa3", "#b5485d", "#6b7280", "#8a7a1f", "#2a8c94")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h2 { margin-top: 2.2rem; } figure { display: inline-block; margin: 0 1.5rem 1rem 0; vertical-align: top; }
figcaption { font-weight: 600; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
table { border-collapse: collapse; display: block; overflow-x: auto;
  margin: 0.5rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8886; padding: 0.2rem 0.7rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.failed { color: #c0392b; font-weight: 600; } .note { opacity: 0.75; }
td.text { text-align: left; overflow-wrap: anywhere; }
"""
_LABEL, _BAR, _VALUE, _ROW = 150, 200, 110, 24  # px: of a chart's columns and rows


def page(reports: list[dict], title: str = "zse bench serve") -> str:
    """The page as text; it is well-formed XML too. reports: as reports.read() gives them, at least one."""
    names: list[str] = list(dict.fromkeys(name for report in reports for name in report["workloads"]))
    swept: dict[str, list[str]] = {}
    for name in names:
        if "@" in name:
            swept.setdefault(name.partition("@")[0], []).append(name)
    body = [f"<h1>{escape(title)}</h1>", _about(reports)]
    body += [_sweep(base, runs, reports) for base, runs in swept.items()]
    body += [_workload(name, reports) for name in names]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8" />\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\" />\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1" />\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _about(reports: list[dict]) -> str:
    """What each report was measured on, and with."""
    rows = []
    for report in reports:
        machine, settings = report["machine"], report["settings"]
        facts = [
            report["model"],
            machine.get("cpu"),
            machine.get("date"),
            (report.get("commit") or "")[:12],
            report.get("command"),
        ]
        cells = "".join(f'<td class="text">{escape(_plain(fact))}</td>' for fact in facts)
        chosen = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
        rows.append(f'<tr><td>{escape(report["label"])}</td>{cells}<td class="text">{escape(chosen)}</td></tr>')
    heads = "".join(f"<th>{head}</th>" for head in ("report", "model", "CPU", "date", "commit", "command", "settings"))
    return f"<table><tr>{heads}</tr>{''.join(rows)}</table>"


def _plain(fact) -> str:
    return "" if fact is None else str(fact)


def _workload(name: str, reports: list[dict]) -> str:
    having = [report for report in reports if name in report["workloads"]]
    runs = [report["workloads"][name] for report in having]
    labels = [report["label"] for report in having]
    note = runs[0].get("workload")
    measures = note.get("measures") if isinstance(note, dict) else None
    charts = [_bars(title, labels, [figure(run, key) for run in runs], more) for key, title, more in CHARTS]
    return (
        f"<h2>{escape(name)}</h2>"
        + (f'<p class="note">{escape(_plain(measures))}</p>' if measures else "")
        + "".join(charts)
        + _table(labels, runs)
    )


def _table(labels: list[str], runs: list[dict]) -> str:
    points = ("mean", "p50", "p90", "p95", "p99")
    heads = ["report", "requests", "failed", "seconds", "tok/s", "requests/s"]
    heads += [f"{time} {point}" for time in ("TTFT", "ITL") for point in points]
    rows = []
    for label, run in zip(labels, runs):
        failed = ' class="failed"' if run["failures"] else ""
        cells = [f"<td>{run['requests']:g}</td>", f"<td{failed}>{run['failures']:g}</td>"]
        values = [run["seconds"], run["output_tok_per_s"], run["requests_per_s"]]
        values += [figure(run, f"{time}.{point}") for time in ("ttft_ms", "itl_ms") for point in points]
        cells += [f"<td>{_number(value)}</td>" for value in values]
        rows.append(f"<tr><td>{escape(label)}</td>{''.join(cells)}</tr>")
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{''.join(rows)}</table>"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _bars(title: str, labels: list[str], values: list[float | None], more_is_better: bool) -> str:
    """Horizontal bars from zero, one for each report, in the order given."""
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    first = next((value for value in values if value), None)
    rows = []
    for index, (label, value) in enumerate(zip(labels, values)):
        y = index * _ROW
        rows.append(f'<text x="{_LABEL - 6}" y="{y + 16}" text-anchor="end">{escape(_short(label))}</text>')
        width = 0.0 if value is None else _BAR * value / top
        color = _COLORS[index % len(_COLORS)]
        rows.append(f'<rect x="{_LABEL}" y="{y + 4}" width="{width:.1f}" height="{_ROW - 8}" rx="2" fill="{color}" />')
        beside = ""
        if index and first and value:
            beside = f" ({value / first if more_is_better else first / value:.2f}×)"
        rows.append(f'<text x="{_LABEL + width + 6:.1f}" y="{y + 16}">{_number(value)}{beside}</text>')
    return _figure(title, _LABEL + _BAR + _VALUE, len(labels) * _ROW, rows)


def _short(label: str) -> str:
    return label if len(label) <= 22 else label[:21] + "…"


def _figure(title: str, width: int, height: int, parts: list[str]) -> str:
    # xmlns: a reader of the page as XML sees SVG too.
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><title>{escape(title)}</title>{"".join(parts)}</svg></figure>'
    )


def _rate(name: str) -> float | None:
    try:
        return float(name.partition("@")[2])
    except ValueError:
        return None


def _sweep(base: str, names: list[str], reports: list[dict]) -> str:
    """P95s and the throughput over the request rate, a line for each report."""
    shown = [
        ("ttft_ms.p95", "TTFT p95, ms"),
        ("itl_ms.p95", "ITL p95, ms"),
        ("output_tok_per_s", "Output tokens a second"),
    ]
    rates = sorted((rate, name) for name in names if (rate := _rate(name)) is not None)
    charts = []
    for key, title in shown:
        lines = [
            (report["label"], [(rate, figure(report["workloads"][name], key)) for rate, name in rates
                               if name in report["workloads"]])
            for report in reports
        ]  # fmt: skip
        charts.append(_lines(f"{title}, over requests a second", lines))
    return f"<h2>{escape(base)}</h2>{''.join(charts)}"


def _lines(title: str, lines: list[tuple[str, list[tuple[float, float | None]]]]) -> str:
    """Polylines over a linear axis from zero; the legend stands below."""
    left, top, width, height = 50, 8, 340, 180
    points = [point for _, line in lines for point in line if point[1] is not None]
    if not points:
        return ""
    right = max(x for x, _ in points) or 1.0
    high = max(y or 0.0 for _, y in points) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return left + width * x / right, top + height * (1 - y / high)

    parts = [
        f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="currentColor" opacity="0.5" />'
    ]
    for share in (0.5, 1.0):
        parts.append(
            f'<text x="{left - 6}" y="{at(0, high * share)[1] + 4:.1f}" text-anchor="end">'
            f"{_number(high * share)}</text>"
        )
    for x in sorted({x for x, _ in points}):
        parts.append(f'<text x="{at(x, 0)[0]:.1f}" y="{top + height + 16}" text-anchor="middle">{x:g}</text>')
    for index, (label, line) in enumerate(lines):
        color = _COLORS[index % len(_COLORS)]
        places = [at(x, y) for x, y in line if y is not None]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2" />')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}" />' for x, y in places]
        below = top + height + 36 + index * 18
        parts.append(f'<rect x="{left}" y="{below - 10}" width="12" height="12" fill="{color}" />')
        parts.append(f'<text x="{left + 18}" y="{below}">{escape(label)}</text>')
    return _figure(title, left + width + 20, top + height + 36 + 18 * len(lines), parts)
