"""Writes the tables of benchmarks/results into README.md, or checks that they are there.

python scripts/readme_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINKS = {
    "socket": "raw socket, two processes, no relay",
    "local": "local, threads of one process",
    "hub": "hub without TLS (loopback only)",
    "hub+tls": "hub",
    "amqp-raw": "RabbitMQ alone, our data path",
    "amqp": "RabbitMQ link",
}
AVERAGES = {
    ("gloo", "gloo", "fp32"): "gloo: peer to peer, no relay",
    ("bare", "bare", "fp32"): "a bare relay, for comparison: the least that any does",
    ("hub", "team", "fp32"): "hub without TLS",
    ("hub", "team", "bf16"): "hub without TLS, bf16 on the wire",
    ("hub", "team", "int8"): "hub without TLS, int8 on the wire",
    ("hub+tls", "team", "fp32"): "hub",
    ("door", "team", "fp32"): "hub of the same machine, by its door",
    ("door", "team", "bf16"): "the same, bf16",
    ("bare-amqp", "bare-amqp", "fp32"): "a bare client of RabbitMQ: the least that any does",
    ("bare-amqp", "bare-amqp", "bf16"): "the same, bf16",
    ("amqp", "team", "fp32"): "RabbitMQ",
    ("amqp", "team", "bf16"): "RabbitMQ, bf16 on the wire",
    ("amqp", "team", "int8"): "RabbitMQ, int8 on the wire",
    ("amqp+tls", "team", "fp32"): "RabbitMQ with TLS",
    ("hub", "rounds", "fp32"): "hub without TLS, elastic",
    ("door", "rounds", "fp32"): "hub of the same machine, elastic",
    ("amqp", "rounds", "fp32"): "RabbitMQ, elastic",
    ("hivemind", "hivemind", "fp32"): "hivemind: peer to peer",
}
BACKENDS = {
    "gloo": "gloo",
    "bare": "a bare relay, for comparison: the least that any does",
    "hub": "hub without TLS",
    "door": "hub of the same machine, by its door",
    "amqp": "RabbitMQ",
}
TRAININGS = {
    "plain": "a plain loop, one process",
    "alone": "the same with `manyhands.join`, alone",
    "gloo": "DDP over gloo",
    "hub": "`manyhands.join`, hub without TLS",
    "door": "`manyhands.join`, hub of the same machine, by its door",
    "amqp": "`manyhands.join`, RabbitMQ",
    "hivemind": "hivemind.Optimizer",
    "torchft": "torchft: its DDP over its gloo",
}
WAYS = {
    "plain": "a plain loop, one process",
    "alone": "a plan of one stage",
    "naive": "two stages, one microbatch",
    "afab": "two stages, all forward, all backward",
    "1f1b": "two stages, 1F1B",
    "interleaved": "two stages a peer, interleaved",
    "torch": "torch.distributed.pipelining, 1F1B",
    "1f1b@hub": "two stages, 1F1B, hub without TLS",
    "1f1b@door": "two stages, 1F1B, hub of the same machine, by its door",
    "1f1b@amqp": "two stages, 1F1B, RabbitMQ",
}
READERS = {
    "direct": "`Loader`, no workers",
    "torch-direct": "torch's DataLoader, no workers",
    "process": "`Loader`, 2 processes",
    "thread": "`Loader`, 2 threads",
    "torch": "torch's DataLoader, 2 processes",
}
STARTS = {
    ("hello", "client"): "submit to a program's first line, from Python",
    ("hello", "command"): "the same, by the command line",
    ("step", "client"): "submit to the end of a first step with torch, from Python",
    ("step", "command"): "the same, by the command line",
}


def links(result: dict) -> list[str]:
    """MB/s of every link."""
    rows = {
        (row["link"] + "+tls" * row["tls"], row["peers"], row["pattern"], row["message_bytes"]): row
        for row in result["rows"]
    }
    sizes = sorted({key[1] for key in rows})
    big, small = 1 << 20, 64
    head = [
        "one way, 2 peers",
        *(f"all to all, {n}" for n in sizes),
        "small messages/s",
        "CPU s/GB",
        "peak MB of a peer / the relay, 8 peers",
    ]
    lines = [
        f"MB/s of payload in 1 MiB messages (median of {result['rows'][0]['turns']} turns; "
        f"{result['machine']['cores']} cores for everything, peers, relay and broker):",
        "",
        *_head("link", head),
    ]
    for link, name in LINKS.items():
        one = rows.get((link, 2, "one-way", big))
        if one is None:
            continue
        cells = [f"{one['mb_per_s']:.0f}"]
        for n in sizes:
            row = rows.get((link, n, "all-to-all", big))
            cells.append("" if row is None else f"{row['mb_per_s']:.0f}")
        cells.append(f"{rows[link, 2, 'one-way', small]['messages_per_s']:.0f}")
        cells.append(f"{one['cpu_s_per_gb']:.1f}")
        cells.append(_memory(rows.get((link, sizes[-1], "all-to-all", big), one)))
        lines.append(_row(name, cells))
    return lines


def allreduce(result: dict) -> list[str]:
    """Milliseconds of an average, and how many times gloo's."""
    rows = {
        (
            row["link"] + "+tls" * row["tls"],
            row["engine"],
            row["wire"],
            row["peers"],
            row["mbytes"],
        ): row
        for row in result["rows"]
    }
    cells = sorted({key[3:] for key in rows}, key=lambda cell: (cell[1], cell[0]))
    lines = [
        "Milliseconds, median (p10 to p90), and times gloo's median of the same run:",
        "",
        *_head("", [f"{peers} peers, {mbytes} MB" for peers, mbytes in cells]),
    ]
    for kind, name in AVERAGES.items():
        found = [rows.get((*kind, *cell)) for cell in cells]
        if any(found):
            lines.append(_row(name, [_time(row) for row in found]))
    return lines


def ddp(result: dict) -> list[str]:
    """Steps a second of a turn, and how many times gloo's."""
    rows = {(r["link"], r["peers"], r["parameters"]): r for r in result["rows"]}
    cells = sorted({key[1:] for key in rows}, key=lambda cell: (cell[1], cell[0]))
    head = [f"{ranks} ranks, {parameters / 1e6:.0f} M parameters" for ranks, parameters in cells]
    lines = [
        "Steps a second, median of turns (p10 to p90), and times gloo's of the same run:",
        "",
        *_head("", head),
    ]
    for backend, name in BACKENDS.items():
        found = [rows.get((backend, *cell)) for cell in cells]
        if any(found):
            lines.append(_row(name, [_steps(row) for row in found]))
    return lines


def train(result: dict) -> list[str]:
    """Samples a second, and how many times the plain loop's, or gloo's."""
    rows = {(r["link"], r["peers"], r["parameters"]): r for r in result["rows"]}
    cells = sorted({key[1:] for key in rows}, key=lambda cell: (cell[1], cell[0]))
    many = len({parameters for _, parameters in cells}) > 1
    head = [
        f"{peers} peer{'s' * (peers > 1)}" + f", {parameters / 1e6:.0f} M parameters" * many
        for peers, parameters in cells
    ]
    lines = [
        "Samples a second, median (p10 to p90), and times plain's or gloo's of the same run:",
        "",
        *_head("", head),
    ]
    for link, name in TRAININGS.items():
        found = [rows.get((link, *cell)) for cell in cells]
        if any(found):
            lines.append(_row(name, [_rate(row) for row in found]))
    return lines


def stages(result: dict) -> list[str]:
    """Milliseconds of a step, and how it compares."""
    lines = [
        "Milliseconds of a step, median (p10 to p90); times as fast as the others of the same run:",
        "",
        *_head("", ["step", "plain", "naive", "torch", "waits", "of it for a core", "in theory"]),
    ]
    for row in result["rows"]:
        times = (1e3 * row[key] for key in ("median_s", "p10_s", "p90_s"))
        several = row["peers"] > 1
        cells = [
            "{:.0f} ({:.0f} to {:.0f})".format(*times),
            f"{row['ratio_to_plain']:.2f}x",
            f"{row['ratio_to_naive']:.2f}x",
            f"{row['ratio_to_torch']:.2f}x",
            f"{row['bubble']:.1%}" if several else "",
            f"{row['queued']:.1%}" if several and row["queued"] is not None else "",
            f"{row['bubble_in_theory']:.1%}" if several else "",
        ]
        lines.append(_row(WAYS[row["way"]], cells))
    return lines


def data(result: dict) -> list[str]:
    """Images a second, next to torch's of as many workers (threads: of as many processes)."""
    rows = {row["way"]: row for row in result["rows"]}
    lines = ["Images a second, and times torch's of as many workers, of the same run:", ""]
    lines += _head("", ["images/s", "torch"])
    for way, name in READERS.items():
        row = rows[way]
        cells = [f"{row['samples_per_s']:.0f}", f"{row['ratio_to_torch']:.2f}x"]
        lines.append(_row(name, cells))
    return lines


def cluster(result: dict) -> list[str]:
    """What a user waits for, next to Ray."""
    rows = result["rows"]

    def found(what: str, system: str, **wanted: object) -> dict | None:
        asked = {"what": what, "system": system, **wanted}
        return next((row for row in rows if asked.items() <= row.items()), None)

    def line(name: str, what: str, show: Callable[[dict], str], **wanted: object) -> str:
        both = (found(what, system, **wanted) for system in ("manyhands", "ray"))
        return _row(name, ["" if row is None else show(row) for row in both])

    def seconds(row: dict) -> str:
        return "{:.2f} ({:.2f} to {:.2f})".format(*(row[k] for k in ("median_s", "p10_s", "p90_s")))

    def rate(row: dict) -> str:
        return f"{1 / row['median_s']:.0f}/s"

    def milliseconds(row: dict) -> str:
        return f"{1e3 * row['median_s']:.0f} ms"

    ticks = [row for row in rows if row["what"] == "tick" and row["hosts"] == 1000]

    def slowest(*, whole: bool) -> list[str]:
        of = (row for row in ticks if _whole(row) is whole)
        return [milliseconds(max(of, key=lambda row: row["median_s"])), ""]

    return [
        "Seconds, median (p10 to p90), where nothing else is said; both in one run:",
        "",
        *_head("", ["manyhands", "`ray job submit`"]),
        *(line(n, "start", seconds, job=job, by=by) for (job, by), n in STARTS.items()),
        line("submissions, one client", "submit", rate, clients=1),
        line("submissions, eight at once", "submit", rate, clients=8),
        line("64 MB of a job's log, followed", "logs", lambda row: f"{row['mb_per_s']:.0f} MB/s"),
        line("a coordinator after kill -9, 1,000 jobs", "recovery", seconds),
        _row(
            "a decision, 1,000 hosts, 10,000 jobs, the slowest of five moments",
            slowest(whole=False),
        ),
        _row("the same with all that a tick does beside it", slowest(whole=True)),
    ]


def _steps(row: dict | None) -> str:
    if row is None:
        return ""
    rates = sorted(row["turn_steps_per_s"])
    low, high = (rates[round(q * (len(rates) - 1))] for q in (0.1, 0.9))
    rate = f"{row['steps_per_s']:.1f} ({low:.1f} to {high:.1f})"
    return rate + (f", {row['ratio_to_gloo']:.2f}x" if row["ratio_to_gloo"] else "")


def _whole(row: dict) -> bool:
    """Whether a tick is of the whole book, and not a decision alone."""
    return row["moment"].startswith("book")


def _rate(row: dict | None) -> str:
    if row is None:
        return ""
    ratio = row["ratio_to_gloo"] or row["ratio_to_plain"]
    low, high = row["samples_per_s_p10"], row["samples_per_s_p90"]
    rate = f"{row['samples_per_s']:.0f} ({low:.0f} to {high:.0f})"
    return rate + (f", {ratio:.2f}x" if ratio else "")


def _time(row: dict | None) -> str:
    if row is None:
        return ""
    times = f"{1e3 * row['median_s']:.1f} ({1e3 * row['p10_s']:.1f} to {1e3 * row['p90_s']:.1f})"
    times += f", {row['times_gloo']:.2f}x" if row["times_gloo"] else ""
    void = row.get("void_rounds", 0)  # their times are not among these
    return times + (f"; {void} of {row['rounds'] + void} rounds did not average" if void else "")


def _head(first: str, columns: list[str]) -> list[str]:
    return [_row(first, columns), "|---" * (len(columns) + 1) + "|"]


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def _memory(row: dict) -> str:
    relay = row["meeting_point_peak_rss_bytes"]
    return f"{row['peak_rss_bytes'] / 1e6:.0f}" + (f" / {relay / 1e6:.0f}" if relay else "")


def with_table(text: str, name: str, lines: list[str], machine: dict) -> str:
    """The text with that table between its marks."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    lines = [*lines, "", f"`make bench`; {machine['cpu']}, Python {machine['python']}."]
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}"


def main() -> int:
    """0 when README.md has the tables."""
    readme = ROOT / "README.md"
    text = wanted = readme.read_text()
    for make in (links, allreduce, ddp, train, stages, data, cluster):
        name = make.__name__
        if f"<!-- bench:{name} -->" not in text:
            continue
        result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        wanted = with_table(wanted, name, make(result), result["machine"])
    if "--check" in sys.argv:
        if wanted != text:
            print("README.md: a table is not that of its result; run scripts/readme_table.py")
        return wanted != text
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
