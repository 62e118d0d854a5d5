"""Writes the table of benchmarks/results/links.json into README.md, or checks that it is there.

python scripts/readme_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- bench:links -->", "<!-- /bench:links -->"
NAMES = {
    "socket": "raw socket, two processes, no relay",
    "local": "local, threads of one process",
    "hub": "hub without TLS (loopback only)",
    "hub+tls": "hub",
    "amqp-raw": "RabbitMQ alone, our data path",
    "amqp": "RabbitMQ link",
}


def table(result: dict) -> str:
    """The rows that matter to a reader, in Markdown."""
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
        "| link | " + " | ".join(head) + " |",
        "|---" * (len(head) + 1) + "|",
    ]
    for link, name in NAMES.items():
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
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"`make bench`; {result['machine']['cpu']}, Python {result['machine']['python']}.",
    ]
    return "\n".join(lines)


def _memory(row: dict) -> str:
    relay = row["meeting_point_peak_rss_bytes"]
    return f"{row['peak_rss_bytes'] / 1e6:.0f}" + (f" / {relay / 1e6:.0f}" if relay else "")


def main() -> int:
    """0 when README.md has the table."""
    result = json.loads((ROOT / "benchmarks/results/links.json").read_text())
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}\n{table(result)}\n{END}{after}"
    if "--check" in sys.argv:
        if wanted != text:
            print(
                "README.md: the table is not that of the stored result; run scripts/readme_table.py"
            )
        return wanted != text
    readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
