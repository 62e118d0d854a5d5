"""How fast links move messages, next to a raw socket copy and the broker's own limit.

    python benchmarks/links.py --link local,hub,hub+tls,amqp --peers 2,4,8 --json FILE

Every peer is a process (threads for `local`), the meeting point is one too. `one-way`: each peer of
the first half sends to one of the second; `all-to-all`: each sends to every other, with a sending
and a receiving thread. A row is the median of several turns; turns of all links alternate, so that
a disturbance of the machine meets them alike. CPU seconds are those of all processes together.
`socket` is sendall/recv_into between two processes, `amqp-raw` our AMQP data path without a link.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from guardian import guarded
from harness import cpu_of, forget_peaks, hub_process, machine, peaks_of, quantile

from manyhands.core.address import parse_address
from manyhands.core.peers import PeerState, View
from manyhands.links.amqp import login_of
from manyhands.links.amqp.channel import AmqpChannel
from manyhands.links.amqp.line import Deaf
from manyhands.links.base import Delivery, open_link
from manyhands.links.messages import Ready
from manyhands.testing.broker import Broker
from manyhands.testing.processes import end_tree

BIG, SMALL = 1 << 20, 64


# -- one peer -------------------------------------------------------------------------------------


def targets_of(rank: int, size: int, pattern: str) -> list[int]:
    """Whom that peer sends to."""
    if pattern == "all-to-all":
        return [(rank + k) % size for k in range(1, size)]
    return [rank + size // 2] if rank < size // 2 else []


def expected_by(rank: int, size: int, pattern: str, count: int) -> int:
    """How many messages that peer receives."""
    senders = [r for r in range(size) if rank in targets_of(r, size, pattern)]
    return count * len(senders)


def peer(url: str, run: str, rank: int, size: int, pattern: str, num_bytes: int, count: int):
    """Join, wait for everybody, move `count` messages a pair; returns what it took."""
    scratch = memoryview(bytearray(num_bytes))
    ours = memoryview(bytes(os.urandom(num_bytes)))
    with open_link(
        url, run=run, name=f"peer-{rank:02}", place=lambda sender, message, sizes: [scratch]
    ) as link:
        link.tell(Ready())
        roster = wait_for(link, size)
        link.send(None, b"go", [scratch])  # a barrier: nobody starts before everybody is here
        mail = Mailbox(link)
        mail.wait(b"go", size - 1)
        by_rank = {int(p.name[-2:]): p for p in roster}
        targets = [by_rank[r] for r in targets_of(rank, size, pattern)]
        cpu, start = time.process_time(), time.perf_counter()

        def send() -> None:
            for _ in range(count):
                for target in targets:
                    link.send(target, b"x", [ours])

        sender = threading.Thread(target=send)
        sender.start()
        mail.wait(b"x", expected_by(rank, size, pattern, count))
        sender.join()
        elapsed = time.perf_counter() - start
        cpu = time.process_time() - cpu
        link.send(None, b"done", [scratch])  # nobody leaves while others still read
        mail.wait(b"done", size - 1)
        # The last message of a peer that closes may still be on its way to others: wait for all.
        link.flush(30)
    return {"elapsed_s": elapsed, "cpu_s": cpu, "rss": peak_rss()}


def wait_for(link, size: int):
    while True:
        event = link.receive(30)
        if isinstance(event, View) and len(event.peers(PeerState.ACTIVE)) == size:
            return event.peers()


class Mailbox:
    """Counts messages by what they say: a fast peer is a phase ahead of a slow one."""

    def __init__(self, link) -> None:
        self._link, self._counts = link, Counter()

    def wait(self, message: bytes, count: int) -> None:
        while self._counts[message] < count:
            event = self._link.receive(60)
            if isinstance(event, Delivery):
                self._counts[event.message] += 1


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- one turn -------------------------------------------------------------------------------------


def run_peers(url: str, size: int, pattern: str, num_bytes: int, count: int, meeting: list[int]):
    """One turn with processes as peers: seconds, CPU seconds, memory."""
    run = f"bench-{os.urandom(4).hex()}"
    forget_peaks(meeting)
    before = cpu_of(meeting)
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(child("peer", url, run, rank, size, pattern, num_bytes, count))
            for rank in range(size)
        ]
        said = [result_of(job) for job in jobs]
    return {
        "elapsed_s": max(s["elapsed_s"] for s in said),
        "cpu_s": sum(s["cpu_s"] for s in said) + cpu_of(meeting) - before,
        "meeting_cpu_s": cpu_of(meeting) - before,
        "meeting_rss": peaks_of(meeting),
        "rss": max(s["rss"] for s in said),
    }


def run_local(size: int, pattern: str, num_bytes: int, count: int):
    """One turn with threads as peers."""
    run = f"bench-{os.urandom(4).hex()}"
    said: list = [None] * size
    cpu = time.process_time()

    def one(rank: int) -> None:
        said[rank] = peer("local:///", run, rank, size, pattern, num_bytes, count)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "elapsed_s": max(s["elapsed_s"] for s in said),
        "cpu_s": time.process_time() - cpu,
        "meeting_cpu_s": 0.0,
        "rss": peak_rss(),
    }


def run_socket(num_bytes: int, count: int):
    """sendall to recv_into over loopback, two processes: the sender is a fork of this one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if child == 0:
            with socket.create_connection(server.getsockname()) as out:
                data = os.urandom(num_bytes)
                for _ in range(count):
                    out.sendall(data)
            os._exit(0)
        with server.accept()[0] as sock:
            view = memoryview(bytearray(num_bytes))
            cpu, start = time.process_time(), time.perf_counter()
            left = num_bytes * count
            while left:
                left -= sock.recv_into(view[: min(num_bytes, left)])
            elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
        usage = os.wait4(child, 0)[2]
    cpu += usage.ru_utime + usage.ru_stime
    return {"elapsed_s": elapsed, "cpu_s": cpu, "meeting_cpu_s": 0.0, "rss": peak_rss()}


class Count(Deaf):
    """Takes deliveries into one place and counts them."""

    def __init__(self, num_bytes: int, count: int) -> None:
        self._view, self._left = memoryview(bytearray(num_bytes)), count
        self.started, self.done = threading.Event(), threading.Event()

    def on_delivery(self, consumer_tag, delivery_tag, redelivered, header, body_bytes):
        return [self._view]

    def on_body(self) -> None:
        self._left -= 1
        self.started.set()
        if not self._left:
            self.done.set()


def run_amqp_raw(url: str, num_bytes: int, count: int, meeting: list[int]):
    """Publisher to broker to consumer: what the broker itself can do with two clients."""
    queue = f"bench.{os.urandom(4).hex()}"
    handler = Count(num_bytes, count + 1)  # the first one starts the clock
    channel, reader = amqp_channel(
        url, handler, lambda ch: ch.queue_declare(queue, exclusive=False, auto_delete=True)
    )
    channel.consume(queue, "c", no_ack=True)
    forget_peaks(meeting)
    before = cpu_of(meeting)
    with child("publish", url, queue, num_bytes, count + 1) as publisher:
        handler.started.wait(60)
        cpu, start = time.process_time(), time.perf_counter()
        handler.done.wait(120)
        elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
        published = result_of(publisher)
    channel.close()
    reader.join()
    broker = cpu_of(meeting) - before
    return {
        "elapsed_s": elapsed,
        "cpu_s": cpu + published["cpu_s"] + broker,
        "meeting_cpu_s": broker,
        "meeting_rss": peaks_of(meeting),
        "rss": peak_rss(),
    }


def publish(url: str, queue: str, num_bytes: int, count: int):
    channel, reader = amqp_channel(url, Count(1, 0), lambda ch: None)
    data = memoryview(os.urandom(num_bytes))
    cpu = time.process_time()
    for _ in range(count):
        channel.publish("", queue, b"h", [data], mandatory=False)
    cpu = time.process_time() - cpu
    channel.close()
    reader.join()
    return {"cpu_s": cpu}


def amqp_channel(url: str, handler: Count, setup):
    channel = AmqpChannel.open(login_of(parse_address(url)), handler, setup=setup)
    reader = threading.Thread(target=channel.serve)
    reader.start()
    return channel, reader


@contextlib.contextmanager
def child(name: str, *args):
    """A process that calls the function of that name; its result is read by `result_of`.

    Whoever leaves without reading that ends it, with all it has started.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, "--call", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # see Worker
    )
    try:
        process.stdin.write(json.dumps(args).encode() + b"\n")
        process.stdin.close()
        yield process
    finally:
        end_tree(process, patience_s=0.0)
        process.stdout.close()


def result_of(process: subprocess.Popen):
    said = process.stdout.read()
    if process.wait():
        raise RuntimeError(f"a process of the benchmark failed with {process.returncode}")
    return json.loads(said)


def call(name: str, *args):
    with child(name, *args) as process:
        return result_of(process)


# -- the whole ------------------------------------------------------------------------------------


def count_for(link: str, pattern: str, size: int, num_bytes: int, quick: bool) -> int:
    """Messages a pair, for a turn of about a second."""
    if num_bytes == SMALL:
        total = 2000 if quick else 16000
    else:
        total = 100 if quick else {"socket": 2000, "hub+tls": 400}.get(link, 800)
    pairs = size * (size - 1) if pattern == "all-to-all" else max(1, size // 2)
    return max(4, total // pairs)


def plan(links: list[str], sizes: list[int]) -> list[tuple[str, int, str, int]]:
    cells = []
    for num_bytes in (BIG, SMALL):
        for link in links:
            if link in ("socket", "amqp-raw"):
                cells.append((link, 2, "one-way", num_bytes))
                continue
            cells += [(link, n, p, num_bytes) for p in ("one-way", "all-to-all") for n in sizes]
    return cells


def turn(cell, urls: dict[str, str], meeting: dict[str, list[int]], quick: bool):
    link, size, pattern, num_bytes = cell
    count = count_for(link, pattern, size, num_bytes, quick)
    if link == "socket":
        result = call("run_socket", num_bytes, count)
    elif link == "amqp-raw":
        result = call("run_amqp_raw", urls["amqp"], num_bytes, count, meeting["amqp"])
    elif link == "local":
        result = call("run_local", size, pattern, num_bytes, count)
    else:
        result = run_peers(urls[link], size, pattern, num_bytes, count, meeting[link])
    pairs = sum(len(targets_of(r, size, pattern)) for r in range(size))
    return {**result, "messages": count * pairs}


def row_of(cell, turns: list[dict]) -> dict:
    link, size, pattern, num_bytes = cell
    rates = sorted(t["messages"] / t["elapsed_s"] for t in turns)
    seconds = sorted(t["elapsed_s"] for t in turns)
    per_gb = [t["cpu_s"] / (t["messages"] * num_bytes / 1e9) for t in turns]
    rate = statistics.median(rates)
    return {
        "link": link.removesuffix("+tls"),
        "tls": link.endswith("+tls"),
        "peers": size,
        "pattern": pattern,
        "message_bytes": num_bytes,
        "messages": turns[0]["messages"],
        "turns": len(turns),
        "median_s": statistics.median(seconds),
        "p10_s": quantile(seconds, 0.1),
        "p90_s": quantile(seconds, 0.9),
        "messages_per_s": rate,
        "mb_per_s": rate * num_bytes / 1e6,
        "cpu_s": statistics.median(t["cpu_s"] for t in turns),
        "meeting_point_cpu_s": statistics.median(t["meeting_cpu_s"] for t in turns),
        "cpu_s_per_gb": statistics.median(per_gb),
        "peak_rss_bytes": max(t["rss"] for t in turns),
        "meeting_point_peak_rss_bytes": max(t.get("meeting_rss", 0) for t in turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="socket,local,hub,hub+tls,amqp-raw,amqp")
    parser.add_argument("--peers", default="2,4,8")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few messages: does it run at all?")
    args = parser.parse_args()
    links, sizes = args.link.split(","), [int(n) for n in args.peers.split(",")]
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = {}
        meeting: dict[str, list[int]] = {}
        for link in {"hub", "hub+tls"} & set(links):
            urls[link], pid = stack.enter_context(hub_process(tls=link == "hub+tls"))
            meeting[link] = [pid]
        if {"amqp", "amqp-raw"} & set(links):
            broker = stack.enter_context(Broker())
            urls["amqp"], meeting["amqp"] = broker.url(), list(broker.process_ids())
        cells = plan(links, sizes)
        turns: dict[tuple, list[dict]] = {cell: [] for cell in cells}
        for n in range(args.turns):
            for cell in cells:
                turns[cell].append(turn(cell, urls, meeting, args.quick))
            print(f"turn {n + 1} of {args.turns} done", file=sys.stderr)
    rows = [row_of(cell, turns[cell]) for cell in cells]
    add_ratios(rows)
    show(rows)
    if args.json:
        result = {"bench": "links", "machine": machine(), "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def add_ratios(rows: list[dict]) -> None:
    """Throughput against the raw socket copy of the same run."""
    base = {r["message_bytes"]: r["messages_per_s"] for r in rows if r["link"] == "socket"}
    for row in rows:
        if row["message_bytes"] in base:
            row["ratio_to_socket"] = row["messages_per_s"] / base[row["message_bytes"]]


def show(rows: list[dict]) -> None:
    print(f"{'link':10} {'peers':>5} {'pattern':>10} {'bytes':>8} {'MB/s':>8} {'msg/s':>9} "
          f"{'CPU s/GB':>8} {'peer MB':>7} {'relay MB':>8}")  # fmt: skip
    for r in rows:
        name = r["link"] + ("+tls" if r["tls"] else "")
        print(f"{name:10} {r['peers']:5} {r['pattern']:>10} {r['message_bytes']:8} "
              f"{r['mb_per_s']:8.0f} {r['messages_per_s']:9.0f} {r['cpu_s_per_gb']:8.2f} "
              f"{r['peak_rss_bytes'] / 1e6:7.0f} "
              f"{r['meeting_point_peak_rss_bytes'] / 1e6:8.0f}")  # fmt: skip


CALLS = {f.__name__: f for f in (peer, publish, run_amqp_raw, run_local, run_socket)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        asked = sys.stdin.readline()
        if asked:  # else whoever was to ask has been ended
            print(json.dumps(CALLS[sys.argv[2]](*json.loads(asked))))
    else:
        with guarded():
            main()
