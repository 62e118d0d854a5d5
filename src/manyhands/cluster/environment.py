"""The environment of a rank: torchrun's variables, the job's own, and no secret of the cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence

from manyhands.cluster.devices import cores_of
from manyhands.cluster.messages import Kind, Slot, Want
from manyhands.core.settings import OUTAGE, OUTAGE_S

ATTEMPT, HOST = "MANYHANDS_ATTEMPT", "MANYHANDS_HOST"
"""Every process of an attempt has both, and is known by them: `marker`, and the agent's host."""
RESERVED = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "CUDA_VISIBLE_DEVICES"),
        *(ATTEMPT, HOST, "MANYHANDS_JOB", "MANYHANDS_RESTART_COUNT", "MANYHANDS_BATCH"),
        *("MANYHANDS_URL", "MANYHANDS_RUN", "MANYHANDS_NAME", "MANYHANDS_CORES"),
    }
)
"""What a job's own variables may not be called."""
_SECRET_NAMES = frozenset({"MODEL_TOKEN"})
_OF_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_")
"""What whoever started the agent says of *its* ranks: programs would believe it of themselves."""
_OF_AGENT = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID"}
)
"""What systemd says to the agent alone."""
_OF_SESSION = ("XDG_", "DBUS_", "SSH_", "SHELL", "MAIL")
_JOIN_CODE = re.compile(r"\bmhc?1-[\w-]{8,}")


def marker(cluster: str, job: int, attempt: int) -> str:
    """The value of MANYHANDS_ATTEMPT."""
    return f"{cluster}/{job}/{attempt}"


def marks_of(key: tuple[str, int, int], host: str) -> dict[str, str]:
    """What every process of an attempt has in its environment, and is known by."""
    return {ATTEMPT: marker(*key), HOST: host}


def scrubbed(environment: Mapping[str, str], secrets: Collection[str] = ()) -> dict[str, str]:
    """Without what is ours, or meant for the agent alone, and without any variable that has a join
    code or one of `secrets`.
    """
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("MANYHANDS_", *_OF_LAUNCHERS))
        and name not in _SECRET_NAMES | _OF_AGENT
        and not _JOIN_CODE.search(value)
        and not any(secret and secret in value for secret in secrets)
    }


def of_user(environment: Mapping[str, str], name: str, home: str) -> dict[str, str]:
    """The environment of another user than the agent's."""
    kept = {key: value for key, value in environment.items() if not key.startswith(_OF_SESSION)}
    return {**kept, "HOME": home, "USER": name, "LOGNAME": name}


def rank_environments(
    base: Mapping[str, str],
    python: str,
    marks: Mapping[str, str],
    want: Want,
    slots: Sequence[Slot],
    lease_s: float,
) -> dict[int, dict[str, str]]:
    """For each rank of the task on this host.

    `base` is scrubbed; `python` is the agent's own, found first by the command; `slots` are all of
    the host's. All ranks see the devices of all, and LOCAL_RANK counts them: torchrun's scripts
    say `torch.cuda.set_device(LOCAL_RANK)`. `lease_s`: how long they live without a coordinator.
    """
    task, by_index = want.task, {slot.index: slot for slot in slots}
    mine = [by_index[index] for _, index in task.ranks]
    path = base.get("PATH") or os.defpath  # an empty one would end in the job's own folder
    common = {
        **base,
        "PATH": os.pathsep.join([os.path.dirname(python), path]),
        # A log is read while it grows, and has both streams in the order in which they came.
        "PYTHONUNBUFFERED": base.get("PYTHONUNBUFFERED", "1"),
    }
    settled = {
        **marks,
        "WORLD_SIZE": str(task.world_size),
        "LOCAL_WORLD_SIZE": str(len(task.ranks)),
        "GROUP_RANK": str(task.rank_of_host),
        "GROUP_WORLD_SIZE": str(task.num_hosts),
        "ROLE_NAME": "default",  # torchrun's, which has one role for all ranks
        "ROLE_WORLD_SIZE": str(task.world_size),
        "MASTER_ADDR": task.master_addr,
        "MASTER_PORT": str(task.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(want.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(task.spec.max_restarts),
        # That there is one tells torch, and Lightning, that its ranks were started by others.
        "TORCHELASTIC_RUN_ID": f"job-{want.job}",
        # There is no store of ours at MASTER_PORT: rank 0 opens it.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MANYHANDS_JOB": str(want.job),
        "MANYHANDS_RESTART_COUNT": str(want.attempt),
    }
    if any(slot.kind is Kind.GPU for slot in mine):
        settled["CUDA_VISIBLE_DEVICES"] = ",".join(slot.device for slot in mine)
    if task.spec.batch is not None:
        settled["MANYHANDS_BATCH"] = str(task.spec.batch)
    if task.hub:
        # All ranks start together, so a run begins with all; a job may say otherwise.
        common["MANYHANDS_MIN_PEERS"] = str(task.world_size)
        # The hub goes and comes back with the coordinator; whoever gives it up ends the job.
        common[OUTAGE] = f"{lease_s + OUTAGE_S:g}"
        settled |= {"MANYHANDS_URL": task.hub, "MANYHANDS_RUN": task.run}
    return {
        rank: {
            **common,
            **_threads(base, by_index[index], len(slots)),
            **task.spec.env,
            **settled,
            **_own_cores(by_index[index]),
            "RANK": str(rank),
            "ROLE_RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "MANYHANDS_NAME": f"rank-{rank}",
        }
        for local_rank, (rank, index) in enumerate(task.ranks)
    }


def _own_cores(slot: Slot) -> dict[str, str]:
    """How many a rank is pinned to, which no other rank has: its affinity alone does not say that
    it need not share them.
    """
    cores = cores_of(slot)
    return {"MANYHANDS_CORES": str(len(cores))} if cores else {}


def _threads(base: Mapping[str, str], slot: Slot, num_slots: int) -> dict[str, str]:
    """A share has the threads of its cores; a GPU its part of all, unless the agent was told."""
    if slot.kind is Kind.CPU:
        return {"OMP_NUM_THREADS": str(max(1, len(cores_of(slot))))}
    threads = max(1, (os.cpu_count() or 1) // num_slots)
    return {"OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", str(threads))}
