"""DeepPool's flags, and its client's parameters."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.cluster.errors import CoordinatorClosed
from manyhands.cluster.follow import Follower
from manyhands.cluster.identity import open_identity
from manyhands.cluster.job import Job, Spec
from manyhands.compat.deeppool.client import ClusterClient, options_of
from manyhands.compat.deeppool.cluster import ignored, main, parser, settings_of
from manyhands.compat.deeppool.program import Lesson, parser_of, run
from manyhands.core.errors import NoMeetingPoint, SettingsError, UsageError

_RUNTIME = [
    *("myAddr", "device", "rank", "worldSize", "be_batch_size", "sample_per_kernel"),
    *("be_jit_file", "use_fg_graph", "use_be_graph", "min_layer_sync", "sync_bucket_size"),
    *("profile_stage_time", "profile_layer_times_graph", "profile_layer_times_timers"),
    *("cuda_profile", "debug", "be_image_px", "run_be_as_hipri", "be_graph_split_ms"),
    *("be_tasklet_depth", "fg_tasklet_depth", "target_slowdown_factor", "graph_merge_min_us"),
    *("graph_merge_max_us", "graph_merge_max_subgraphs", "cifar_dataset"),
]
_CLUSTER = ["c10dBackend", "logLevel", "pathToConfig", "install", "profile", "cpp"]


@pytest.mark.parametrize("name", [*_RUNTIME, *_CLUSTER])
@pytest.mark.parametrize("form", ["alone", "apart", "joined"])
def test_every_flag_of_deeppool_is_taken(name, form):
    given = {"alone": [f"--{name}"], "apart": [f"--{name}", "7"], "joined": [f"--{name}=7"]}[form]
    (line,) = ignored(parser().parse_args([*given, "--logdir", "x"]))
    assert line.startswith(f"ignored: --{name} (" if form == "alone" else f"ignored: --{name}=7 (")


@pytest.mark.parametrize("typed", [["--hostfil", "x"], ["--be_batch", "0"], ["word"]])
def test_flags_that_nobody_knows(capsys, typed):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(typed)
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_the_seeds_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hostfile.txt").write_text("#address,gpu_idx\n127.0.0.1,0\n127.0.0.1,1\n")
    typed = "--addrToBind 127.0.0.1:12347 --be_batch_size=0 --cpp --logdir logs"
    made = settings_of(parser().parse_args([*typed.split(), "--hostfile", "hostfile.txt"]))
    assert (made.bind, made.logdir) == ("127.0.0.1:12347", tmp_path / "logs")
    assert [(host.address, host.gpus) for host in made.hosts] == [("127.0.0.1", (0, 1))]
    assert made.user is None


def test_root_is_told_of_what_jobs_may_do_and_can_say_otherwise(monkeypatch, capsys):
    made = []
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("manyhands.compat.deeppool.cluster.run", made.append)
    assert main([]) == main(["--user", "nobody"]) == 0
    assert [settings.user for settings in made] == [None, "nobody"]
    assert capsys.readouterr().err.count("warning: jobs run as root; --user NAME") == 1


def test_without_a_hostfile_it_is_this_machine():
    (host,) = settings_of(parser().parse_args([])).hosts
    assert (host.is_here, host.gpus, host.slots) == (True, (), None)
    assert settings_of(parser().parse_args(["--manualLaunch"])).hosts == ()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--hostfile", "nowhere.txt"], "nowhere.txt"),
        (["--hostfile", "bad.txt"], "bad.txt:2: "),
        (["--hostfile", "far.txt"], "cannot reach a coordinator"),
    ],
)
def test_what_cannot_be_a_cluster(tmp_path, monkeypatch, capsys, typed, says):
    monkeypatch.chdir(tmp_path)
    Path("bad.txt").write_text("127.0.0.1,0\n127.0.0.1,x\n")
    Path("far.txt").write_text("10.9.8.7,0\n")
    with pytest.raises(SettingsError, match=says):
        settings_of(parser().parse_args(typed))
    assert main(typed) == 2
    assert "error: " in capsys.readouterr().err


def test_a_part_that_fails_takes_the_cluster_down(tmp_path):
    code = "import sys\nfrom manyhands.links.hub import Hub; Hub._tick = lambda self: 1 / 0\n"
    code += "from manyhands.compat.deeppool.cluster import main; sys.exit(main(sys.argv[1:]))"
    typed = ["--addrToBind", "127.0.0.1:0", "--logdir", "logs", "--state", "state"]
    done = subprocess.run(
        [sys.executable, "-c", code, *typed],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "a part of the cluster failed (ZeroDivisionError)" in done.stderr


class Noting:
    """A client that notes what is submitted."""

    def __init__(self, address, *, state):
        self.where = (address, state)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submitTrainingJob(self, name, program, **given):
        Noting.program = program
        return Job(id=7, spec=Spec(command=tuple(program)), submitted_s=0.0)

    def follow(self, id):
        return 0


@pytest.mark.parametrize(
    "typed",
    [
        ["--coordinator", "mhc1-SECRET", "--state", "/s", "--wait"],
        ["--coordinator=mhc1-SECRET", "--state=/s", "--wait"],
        ["--coord", "mhc1-SECRET", "--stat", "/s", "--wai"],
    ],
)
def test_what_is_for_the_one_who_submits_is_not_in_the_job(monkeypatch, capsys, typed):
    """A user code among the words of a command is on every host, for everybody to see."""
    monkeypatch.setattr("manyhands.compat.deeppool.client.ClusterClient", Noting)
    lesson = Lesson(name="x", tables=None, model=None, optimizer=None, lr=0.1)
    given = ["1", "8", *typed, "--epochs", "2", "--save", "/saved"]
    assert run(lesson, "script.py", given, parser_of(lesson, "").parse_args(given)) == 0
    assert Noting.program[1:] == ["1", "8", "--epochs", "2", "--save", "/saved"]


def test_job_parameters():
    given = {
        "training_data": "pets",
        "num_workers": 4,
        "epochs_to_train": 5,
        "checkpoint_path": Path("saved"),
        "loading_path": None,
        "autocast": True,
    }
    options = "--data pets --workers 4 --epochs 5 --save saved --autocast"
    assert options_of(given) == options.split()
    assert options_of({"autocast": False}) == []


@pytest.mark.parametrize(
    "params", [{"catsdogs": True}, {"dset": "x"}, {"num_workers": [1]}, {"epochs_to_train": True}]
)
def test_job_parameters_that_mean_nothing(params):
    with pytest.raises(UsageError, match=next(iter(params))):
        options_of(params)


def test_a_cluster_that_is_not_up(tmp_path):
    with pytest.raises(NoMeetingPoint, match="no token"):
        ClusterClient("127.0.0.1:1", state=tmp_path)


class Refusing:
    """A cluster that must not be asked."""

    def submit(self, *_, **__):
        raise CoordinatorClosed("it was asked")

    def close(self):
        pass


def test_who_stops_following_is_told_that_the_job_lives(tmp_path, monkeypatch, capsys):
    def interrupted(follower):
        raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "run", interrupted)
    open_identity(tmp_path)
    with ClusterClient(state=tmp_path) as client, pytest.raises(KeyboardInterrupt):
        client.follow(7, io.BytesIO())
    said = capsys.readouterr().err
    assert f"job 7 goes on; its output: manyhands logs --state {tmp_path} 7 -f" in said


def test_a_program_that_is_not_there_is_not_submitted(tmp_path):
    (tmp_path / "token").write_text("secret")
    with ClusterClient("http://127.0.0.1:1", state=tmp_path) as client:
        client.cluster.close()
        client.cluster = Refusing()
        with pytest.raises(UsageError, match="no program"):
            client.submitTrainingJob("x", ["nowhere.py"], gpus=1, globalBatchSize=8)
        with pytest.raises(CoordinatorClosed):
            client.submitTrainingJob("x", [__file__], gpus=1, globalBatchSize=8)
