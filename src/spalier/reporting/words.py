"""What the page says in words and single numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spalier.reporting.model import MEASURES, Entry, Findings
from spalier.reporting.naming import TASK_SETTINGS, data_name, density, percent, short, size
from spalier.reporting.series import facets, mean, method_name, method_rank

_SETTINGS = (
    *(
        "network",
        "weights",
        "data",
        "method",
        "rank",
        "criterion",
        "schedule",
        "final_density",
        "densities",
        "budget",
        "ranking",
    ),
    *(
        "writers",
        "recovery",
        "epochs",
        "epochs_per_prune",
        "final_epochs",
        "batch_size",
        "optimizer",
        "lr",
        "lr_schedule",
        "teacher",
    ),
    *("mixed_precision", "seed", "recipe"),
)


def title(findings: Findings) -> str:
    """What the page is about."""
    given = (e.settings.get("name") or data_name(str(e.settings.get("data"))) for e in findings.entries)
    names = dict.fromkeys(map(str, given))
    if not names or len(names) > 3 or findings.kind == "store":
        return findings.name
    network = findings.settings.get("network")
    return f"{', '.join(names)}{f' on {network}' if network else ''}"


def lede(findings: Findings) -> str:
    """The whole in a sentence."""
    entries, runs = findings.entries, findings.runs
    methods = list(dict.fromkeys(method_name(e) for e in entries))
    going = sum(run.state != "done" for run in runs)
    words = (
        f"{_count(len(entries), 'task')} by {', '.join(methods[:4])}{' and others' if len(methods) > 4 else ''}"
        if entries
        else "No task is done yet"
    )
    if findings.kind != "store":
        words += f", from {_count(len(runs), 'run')}"
    if going:
        words += f"; {'it is' if going == len(runs) == 1 else f'{going} are'} not finished"
    targets = [e.target for e in entries]
    if targets and max(targets) > min(targets):
        words += f", from {density(max(targets))} down to {density(min(targets))}"
    return words + "."


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def totals(findings: Findings) -> list[tuple[str, str]]:
    """The few numbers that matter most."""
    found = [*_ends(findings)]
    sizes = [n for e in findings.entries if (n := e.number("bytes"))]
    bases = [n for e in findings.entries if (n := e.number("base"))]
    if sizes:
        found.append((f"in {_count(len(sizes), 'task file')}", size(sum(sizes))))
    if bases:
        found.append(("the base, in float32", size(max(bases))))
    return found


def _ends(findings: Findings) -> Iterator[tuple[str, str]]:
    """Accuracy at the highest and the lowest density of the first method; nothing where tasks do not compare."""
    found = facets(findings)
    if not found or any(name in findings.varied for name in TASK_SETTINGS):
        return
    series = found[0].series[0]
    known = [point for point in series.points if mean(point, findings.measure) is not None]
    for point in known[:1] + known[1:][-1:]:
        seen = mean(point, findings.measure)
        assert seen is not None
        at = f"{density(point[0].target)}, {method_name(point[0])}"
        spread = "" if seen.deviation is None else f"\u00a0±\u00a0{100 * seen.deviation:.1f}"
        seeds = f", mean of {seen.count} seeds" if seen.count > 1 else ""
        yield f"{MEASURES[findings.measure]} at {at}{seeds}", f"{percent(seen.value)}{spread}"
    macs = mean(known[-1], "macs") if len(known) > 1 else None
    if macs is not None:
        yield f"of the MACs at {density(known[-1][0].target)}", percent(macs.value)


NEARLY = 0.04
"""How much less accurate than the best one the task may be that is shown first."""


def start(findings: Findings) -> int:
    """The task that is shown first: the smallest of those that are nearly as good as the best."""
    first = min(findings.entries, key=method_rank, default=None)
    known = [
        (seen, e.number("macs") or 1.0, place)
        for place, e in enumerate(findings.entries)
        if (seen := e.number(findings.measure)) is not None and first is not None and e.run == first.run
    ]
    best = max((seen for seen, _, _ in known), default=0.0)
    near = ((macs, place) for seen, macs, place in known if seen >= best - NEARLY)
    return min(near, default=(1.0, 0))[1]


def facts(entry: Entry) -> list[tuple[str, str]]:
    """All that is known of a task in numbers, and what its file says."""
    said = [(word, text) for word, text in entry.facts.items() if word != "file"]
    seed = [("seed", str(entry.seed))] if entry.seed is not None else []
    return [
        ("density asked for", density(entry.target)),
        *((MEASURES[n], percent(entry.number(n), 2)) for n in MEASURES if entry.number(n) is not None),
        *(found for name, word in _SHARES.items() if (found := _share(entry, name, word)) is not None),
        *_costs(entry),
        *seed,
        *said,
    ]


_SHARES = {"channels": "channels", "weights": "weights", "macs": "MACs"}


def _share(entry: Entry, name: str, word: str) -> tuple[str, str] | None:
    share, left, of = (entry.number(n) for n in (name, f"{name}_left", f"{name}_of"))
    return None if share is None else (word, f"{percent(share)} ({short(left)} of {short(of)})")


def _costs(entry: Entry) -> Iterator[tuple[str, str]]:
    learned, latency, file, network = map(entry.number, ("learned", "latency_ms", "bytes", "network"))
    if learned is not None:
        yield "learned", f"{learned:,.0f} parameters"
    if latency is not None:
        yield "latency", f"{latency:.3g} ms for one sample"
    if file is not None:
        yield "file", f"{file:,.0f} bytes, {entry.facts.get('file', '')}"
    if network is not None:
        yield "network of its own", f"{size(network)} in float32"


def settings(findings: Findings) -> list[tuple[str, str]]:
    """The settings that all runs share."""
    known = findings.settings
    return [(name, _setting(known[name])) for name in _SETTINGS if known.get(name) is not None]


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
