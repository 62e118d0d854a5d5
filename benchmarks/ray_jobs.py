"""Ray's jobs, for cluster.py: a process that has Ray, one JSON object a line in, one a line out.

    python benchmarks/ray_jobs.py FOLDER NUM_CPUS

Starts a Ray of its own on loopback (head, dashboard, no other machine), and ends it with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

PORTS = {"--port": 26379, "--dashboard-port": 28265, "--ray-client-server-port": 26381}
OVER = {"SUCCEEDED", "FAILED", "STOPPED"}


def main() -> None:
    folder, num_cpus = sys.argv[1:]
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=folder)
    ray = str(Path(sys.executable).with_name("ray"))
    ports = [word for option, port in PORTS.items() for word in (option, str(port))]
    start = [
        ray,
        "start",
        "--head",
        *ports,
        "--dashboard-host",
        "127.0.0.1",
        "--num-cpus",
        num_cpus,
    ]
    start += ["--temp-dir", folder, "--disable-usage-stats", "--block"]
    # In the foreground, to be ended by its process: `ray stop` ends every Ray of the machine.
    head = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        serve(f"http://127.0.0.1:{PORTS['--dashboard-port']}", head)
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait()


def connected(address: str, head: subprocess.Popen):
    from ray.job_submission import JobSubmissionClient

    while head.poll() is None:
        try:
            client = JobSubmissionClient(address)
            client.list_jobs()
        except (ConnectionError, RuntimeError):  # its dashboard is not there yet
            time.sleep(0.2)
        else:
            return client
    raise RuntimeError(f"ray start ended with {head.returncode}")


def serve(address: str, head: subprocess.Popen) -> None:
    import ray

    client = connected(address, head)
    answer(version=ray.__version__, address=address)
    for line in sys.stdin:
        words = json.loads(line)
        match words.pop("do"):
            case "submit":
                began_s = time.time()
                ids = [client.submit_job(entrypoint=shlex.join(words["command"]))]
                answer(ids=ids, began_s=began_s, took_s=time.time() - began_s)
            case "wait":
                while (status := client.get_job_status(words["id"]).value) not in OVER:
                    time.sleep(0.02)
                answer(status=status)
            case "rate":
                began_s = time.time()
                command = shlex.join(words["command"])
                for _ in range(words["count"]):
                    client.submit_job(entrypoint=command)
                answer(took_s=time.time() - began_s)
            case "logs":
                began_s = time.time()
                made = client.submit_job(entrypoint=shlex.join(words["command"]))
                num_bytes = asyncio.run(count(client, made))
                answer(took_s=time.time() - began_s, bytes=num_bytes)


async def count(client, job: str) -> int:
    num_bytes = 0
    async for piece in client.tail_job_logs(job):
        num_bytes += len(piece.encode())
    return num_bytes


def answer(**words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
