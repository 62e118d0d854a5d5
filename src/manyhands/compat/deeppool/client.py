"""ClusterClient: DeepPool's name for who submits jobs; ours is `manyhands.cluster.client.Cluster`.

    with ClusterClient("127.0.0.1:12347") as client:
        job = client.submitTrainingJob(
            "cats", ["examples/resnetImported.py"], gpus=4, globalBatchSize=128,
            jobParams={"training_data": "pets", "epochs_to_train": 5, "checkpoint_path": "saved"},
        )

A job is a program that is there on every host, not a model in JSON: what it trains, it says itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from manyhands.cluster.client import Cluster
from manyhands.cluster.follow import Follower, goes_on, same_cluster, to
from manyhands.cluster.job import Job, State
from manyhands.core.errors import UsageError

PYTHON = "python"
"""The first one on a job's PATH is that of its host's agent."""
FLAGS: Mapping[str, str] = {
    "training_data": "--data",
    "evaluation_data": "--evaluation",
    "num_workers": "--workers",
    "epochs_to_train": "--epochs",
    "checkpoint_path": "--save",
    "loading_path": "--load",
    "autocast": "--autocast",
}
"""DeepPool's job parameters, and the options of a program that calls `deeppool.main`."""


class ClusterClient:
    """A cluster, as DeepPool's programs see it. Close it, or leave its `with` block.

    Without an address it is the one of MANYHANDS_COORDINATOR, or of this machine.
    """

    def __init__(
        self, coordinatorAddr: str | None = None, *, state: str | Path | None = None
    ) -> None:
        """`state`: the state folder of the cluster, where its token is."""
        folder = None if state is None else Path(state).expanduser()
        self.cluster = Cluster(coordinatorAddr, state=folder)
        self._more = same_cluster(coordinatorAddr, folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self.cluster.close()

    def submitTrainingJob(
        self,
        jobName: str,
        program: Sequence[str | Path],
        *,
        gpus: int,
        globalBatchSize: int,
        jobParams: Mapping[str, object] | None = None,
        priority: str = "normal",
        workdir: str | Path | None = None,
    ) -> Job:
        """Submit `python PROGRAM` on so many slots; returns the job, which waits or starts.

        `program` is a script, and its arguments if it has any; without any, it gets the slots and
        the batch. `jobParams` become its options. Raises UsageError (BadJob, if the cluster has
        fewer slots) and what `Cluster.submit` raises.
        """
        folder = Path.cwd() if workdir is None else Path(workdir).absolute()
        script, *arguments = map(str, program)
        if not (folder / script).is_file():
            raise UsageError(f"there is no program {folder / script}", hint="the path of a script")
        if not arguments:
            arguments = [str(gpus), str(globalBatchSize)]
        return self.cluster.submit(
            [PYTHON, script, *arguments, *options_of(jobParams or {})],
            name=jobName,
            gpus=gpus,
            batch=globalBatchSize,
            priority=priority,
            workdir=str(folder),
        )

    def follow(self, id: int, stream: BinaryIO | None = None) -> int:
        """Copy rank 0's log to stdout, or `stream`, until the job is over; its exit code.

        A coordinator that goes away meanwhile may come back. Ctrl-C leaves the job as it is.
        """
        write = to(sys.stdout.buffer if stream is None else stream)
        try:
            job = Follower(self.cluster, id, rank=0, write=write, say=_say).run()
        except KeyboardInterrupt:
            _say(goes_on(id, self._more))
            raise
        if job.state is not State.SUCCEEDED:
            words = "" if job.failure is None else f"\n{job.failure.words}"
            _say(f"job {id}: {job.state}, {job.reason}{words}")
        return 1 if job.exit_code is None else job.exit_code


def submitTrainingJob(
    jobName: str,
    program: Sequence[str | Path],
    *,
    gpus: int,
    globalBatchSize: int,
    jobParams: Mapping[str, object] | None = None,
) -> Job:
    """`ClusterClient.submitTrainingJob` of the cluster that the environment names."""
    with ClusterClient() as client:
        submit: Callable[..., Job] = client.submitTrainingJob
        return submit(
            jobName, program, gpus=gpus, globalBatchSize=globalBatchSize, jobParams=jobParams
        )


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def options_of(params: Mapping[str, object]) -> list[str]:
    """Job parameters as options. Raises UsageError for those that mean nothing here."""
    found: list[str] = []
    for name, value in params.items():
        if name not in FLAGS:
            raise UsageError(
                f"the job parameter {name!r} means nothing here",
                hint=f"one of {', '.join(FLAGS)}; a program may have options of its own",
            )
        if name == "autocast":
            found += [FLAGS[name]] if value else []
        elif not isinstance(value, bool) and isinstance(value, str | int | Path):
            found += [FLAGS[name], str(value)]
        elif value is not None:
            raise UsageError(f"the job parameter {name} is {value!r}", hint="a text or a number")
    return found
