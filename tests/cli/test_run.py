"""`manyhands run` as a user runs it: processes, their output, signals, exit codes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import termios
import threading
import time

import psutil
import pytest

from manyhands.cli.launch import exit_code
from manyhands.cli.run import how_to_resume, own_hub
from manyhands.core.errors import ManyhandsError, SettingsError
from manyhands.core.peers import View
from manyhands.links.base import open_link
from manyhands.links.hub import Hub
from manyhands.testing.processes import end_tree, is_gone, tree_of

WAIT_S = 60.0  # for what takes a moment; nothing is measured by it
STEADY = 50  # looks, 10 ms apart, at a pipe that takes no more

# Whoever runs the tests in the background may have SIGINT ignored.
MAIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
{}
from manyhands.cli.main import main
main()
"""

SAY_WHEN_READY = "print('ready', os.getpid(), flush=True)\n"
COUNT_SIGNALS = (  # a script that counts what it gets, and leaves when it has had a moment for more
    "import os, signal, sys, threading, time\n"
    "got = []\n"
    "def note(number, frame):\n"
    "    got.append(signal.Signals(number).name)\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
    # Not signal.pause(): a signal just before it would not end it.
    "    signal.signal(number, note)\n" + SAY_WHEN_READY + "while not got: time.sleep(0.02)\n"
    "threading.Event().wait(0.2)\n"
    "print('got', *got)\n"
)
SLEEP = "import os, time\n" + SAY_WHEN_READY + "time.sleep(600)\n"
DEAF = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP


class Launcher:
    """A `manyhands run` under way."""

    def __init__(self, script, *options, arguments=(), before="", **popen):
        command = [sys.executable, "-c", MAIN.format(before), "run", *options, str(script)]
        self.process = subprocess.Popen(
            [*command, *arguments],
            **{
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "stdin": subprocess.DEVNULL,
                "start_new_session": True,
                **popen,
            },
        )

    def until(self, number, words=b"ready"):
        """The lines on stdout until `number` of them have these words in them."""
        lines, found = [], 0
        while found < number:
            line = self.process.stdout.readline()
            assert line, (lines, self.process.stderr.read())
            lines.append(line)
            found += words in line
        return lines

    def ready(self, number):
        """The ids of the copies, once they all have said that they are ready."""
        return [int(line.split()[-1]) for line in self.until(number) if b"ready" in line]

    def end(self):
        """Exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=WAIT_S)
        assert b"Traceback" not in err, err.decode()
        return self.process.returncode, out.decode(), err.decode()


@pytest.fixture
def launch(tmp_path):
    """Starts `manyhands run OPTIONS` of a script with this text."""
    with contextlib.ExitStack() as stack:

        def start(text, *options, **arguments):
            script = tmp_path / "train.py"
            script.write_text(text)
            launcher = Launcher(script, *options, **arguments)
            stack.callback(close, launcher.process)
            return launcher

        yield start


def close(process):
    end_tree(process, patience_s=0)
    for pipe in (process.stdout, process.stderr, process.stdin):
        if pipe is not None:
            pipe.close()


def lines_of(text):
    """Lines by the name before them, names as numbers of the copies."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.removeprefix("[").partition("] ")
        found.setdefault(int(name.rpartition("-")[2]), []).append(rest)
    return found


def wait_gone(pids):
    """Whether these end in time. They are not our children: there is nothing to wait on."""
    deadline = time.monotonic() + WAIT_S
    left = [psutil.Process(pid) for pid in pids if alive(pid)]  # its number may come round again
    while (left := [one for one in left if not is_gone(one)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def waiting_in(pipe):
    """Bytes that nobody has read."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def alive(pid):
    try:
        return not is_gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


# -- what a copy finds ------------------------------------------------------------------------


TELL = (
    "import json, os, sys\n"
    "ours = ('MANYHANDS_', 'OMP_', 'PYTHONUNB')\n"
    "env = {k: v for k, v in os.environ.items() if k.startswith(ours)}\n"
    "print(json.dumps({'argv': sys.argv, 'path': sys.path[0], 'name': __name__, 'env': env,\n"
    "                  'stdin': sys.stdin.read(), 'sid': os.getsid(0) == os.getpid()}))\n"
)


def test_each_copy_knows_the_run_and_its_name(launch, tmp_path):
    code, out, err = launch(TELL, "-n", "3", "--run", "shakes").end()
    assert code == 0, err
    told = {number: json.loads(lines[0]) for number, lines in lines_of(out).items()}
    assert sorted(told) == [0, 1, 2]
    environments = [copy["env"] for copy in told.values()]
    host = socket.gethostname().split(".")[0]
    assert {e["MANYHANDS_NAME"] for e in environments} == {f"{host}-{i}" for i in range(3)}
    assert {e["MANYHANDS_RUN"] for e in environments} == {"shakes"}
    assert {e["MANYHANDS_MIN_PEERS"] for e in environments} == {"3"}
    assert {e["MANYHANDS_LOCAL_PEERS"] for e in environments} == {"3"}
    assert {e["MANYHANDS_WORLD_SIZE"] for e in environments} == {"3"}
    cores = len(os.sched_getaffinity(0))
    assert {e["OMP_NUM_THREADS"] for e in environments} == {str(max(1, cores // 3))}
    assert all(e["PYTHONUNBUFFERED"] == "1" for e in environments)
    assert not any("MANYHANDS_RESUME" in e for e in environments)
    assert all(
        e["MANYHANDS_AGAIN"].startswith("manyhands run -n 3 --resume ") for e in environments
    )
    assert len({e["MANYHANDS_URL"] for e in environments}) == 1
    for copy in told.values():
        assert copy["argv"] == [str(tmp_path / "train.py")]
        assert copy["path"] == str(tmp_path)
        assert copy["name"] == "__main__"
        assert copy["stdin"] == ""


@pytest.mark.parametrize(
    ("options", "given", "found"),
    [
        (["--resume-if-any"], None, "auto"),
        (["--resume-if-any"], "1", "auto"),
        (["--resume"], "auto", "1"),
        ([], "auto", "auto"),
        ([], "true", "1"),
        ([], "0", None),
        ([], "", None),
        ([], None, None),
    ],
)
def test_how_to_resume(options, given, found):
    environ = {} if given is None else {"MANYHANDS_RESUME": given}
    asked = ("--resume" in options, "--resume-if-any" in options)
    assert how_to_resume(*asked, environ) == found


def test_how_not_to_resume():
    with pytest.raises(SettingsError, match="--resume and --resume-if-any"):
        how_to_resume(True, True, {})
    with pytest.raises(SettingsError, match="MANYHANDS_RESUME is 'sure'"):
        how_to_resume(False, False, {"MANYHANDS_RESUME": "sure"})


def test_a_copy_finds_how_to_resume(launch):
    code, out, err = launch(TELL, "-n", "2", "--resume-if-any").end()
    assert code == 0, err
    told = [json.loads(lines[0])["env"] for lines in lines_of(out).values()]
    assert {e["MANYHANDS_RESUME"] for e in told} == {"auto"}


def test_the_command_for_others_says_how_many_begin(launch):
    code, _, err = launch(TELL, "--min-peers", "3").end()
    assert code == 0, err
    assert re.search(r"manyhands run --hub mh1-\S+ --min-peers 3 \S*train.py\n", err)
    code, _, err = launch(TELL, "-n", "2").end()
    assert re.search(r"manyhands run --hub mh1-\S+ \S*train.py\n", err)


def test_more_copies_than_anybody_means(launch):
    code, _, err = launch(TELL, "-n", "1000000").end()
    assert code == 2
    assert "1024" in err


def test_interrupted_copies_say_in_a_line_where_they_were(launch):
    text = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + SLEEP
    launcher = launch(text, "-n", "2")
    launcher.ready(2)
    launcher.process.send_signal(signal.SIGINT)
    code, _, err = launcher.end()  # which looks for tracebacks
    assert code == 130
    # Where it sleeps, or still in the line that says that it is ready.
    line = r'\[\S+-(\d)\] interrupted: File ".*train.py", line [45], in <module>\n'
    assert sorted(re.findall(line, err)) == ["0", "1"]


TRAIN = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import manyhands as mh

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
again = "MANYHANDS_RESUME" in os.environ
with mh.join() as run:
    model, optimizer, loader, _ = run.wrap(model, optimizer, data, checkpoints=sys.argv[1])
    first = run.round
    print("begins", first, flush=True)
    for _ in range(1 if again else 1_000_000):
        for (x,) in loader:
            if run.round == 5:
                print("ready", os.getpid(), flush=True)
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_the_command_that_an_interrupted_run_says_goes_on_from_there(launch, tmp_path):
    saved = str(tmp_path / "a place")
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    launcher = launch(TRAIN, "-n", "1", arguments=[saved], env=env)
    launcher.until(1)
    launcher.process.send_signal(signal.SIGINT)
    _, err = launcher.process.communicate(timeout=WAIT_S)  # a single copy shows its own traceback
    assert launcher.process.returncode == 130
    round_, command = re.search(r"to go on from round (\d+): (.+)", err.decode()).groups()
    assert int(round_) > 5
    name, word, *words = shlex.split(command)
    assert (name, word) == ("manyhands", "run")
    again = Launcher(words[-2], *words[:-2], arguments=words[-1:], env=env)
    try:
        code, out, err = again.end()
    finally:
        close(again.process)
    assert code == 0, err
    assert f"begins {round_}\n" in out


LOSSES = """
import os, sys, threading
import torch
from torch.utils.data import DataLoader, TensorDataset
import manyhands as mh

def make():
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(40, 3, dtype=torch.float64))
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, DataLoader(data, batch_size=8)

epochs, again = 8, "MANYHANDS_RESUME" in os.environ
with mh.join() as run:
    place = {"epochs": epochs, "checkpoints": sys.argv[1], "save_every": 1000}
    model, optimizer, loader, _ = run.wrap(*make(), **place)
    for _ in range(epochs):
        for (x,) in loader:
            loss = model(x).square().mean()
            mean = run.mean(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run.round_closed:
                print("loss", mean.round, repr(float(mean)), flush=True)
            if run.round > 5 and not again:
                threading.Event().wait(0.5)  # there is somebody left to interrupt
model, optimizer, loader = make()
for number in range(epochs * len(loader) if again else 0):
    (x,) = list(loader)[number % len(loader)]
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("alone", number, repr(float(loss)), flush=True)
"""


def test_two_copies_go_on_where_both_were_interrupted(launch, tmp_path):
    """With the losses of one process; no round is lost or done anew."""
    saved = str(tmp_path / "saved")
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    launcher = launch(LOSSES, "-n", "2", arguments=[saved], env=env)
    lines = launcher.until(2, b"loss 6 ")
    launcher.process.send_signal(signal.SIGINT)
    code, out, err = launcher.end()
    assert code == 130, err
    ((round_, command),) = set(re.findall(r"to go on from round (\d+): (.+)", err))
    _, _, *words = shlex.split(command)
    again = Launcher(words[-2], *words[:-2], arguments=words[-1:], env=env)
    try:
        code, rest, err = again.end()
    finally:
        close(again.process)
    assert code == 0, err
    before, after = losses_of(b"".join(lines).decode() + out), losses_of(rest)
    assert max(before) == int(round_) - 1
    assert min(after) == int(round_)
    assert before | after == pytest.approx(losses_of(rest, "alone"), abs=1e-9)


def losses_of(text, word="loss"):
    return {int(at): float(loss) for at, loss in re.findall(rf"{word} (\d+) (\S+)", text)}


def test_what_the_user_has_set_stays(launch):
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "7",
        "MANYHANDS_NAME": "ann",
        "MANYHANDS_MIN_PEERS": "5",
        "MANYHANDS_RUN": "of-env",
    }
    code, out, err = launch(TELL, "-n", "2", "--resume", env=env).end()
    assert code == 0, err
    told = [json.loads(lines[0])["env"] for _, lines in sorted(lines_of(out).items())]
    assert [e["MANYHANDS_NAME"] for e in told] == ["ann-0", "ann-1"]
    assert {e["OMP_NUM_THREADS"] for e in told} == {"7"}
    assert {e["MANYHANDS_MIN_PEERS"] for e in told} == {"5"}
    assert {e["MANYHANDS_RUN"] for e in told} == {"of-env"}
    assert {e["MANYHANDS_RESUME"] for e in told} == {"1"}
    assert "2 of the 5 peers that begin the run start here" in err


def test_what_follows_the_script_is_the_scripts(launch):
    arguments = ["-n", "4", "--help", "--", "--run", "x", "a b"]
    code, out, err = launch(TELL, arguments=arguments).end()
    assert code == 0, err
    assert json.loads(out)["argv"][1:] == arguments


def test_a_module(launch, tmp_path):
    (tmp_path / "train.py").write_text(TELL)
    launcher = Launcher("train", "-m", arguments=["--flag"], cwd=tmp_path)
    try:
        code, out, err = launcher.end()
    finally:
        close(launcher.process)
    assert code == 0, err
    assert json.loads(out)["argv"] == [str(tmp_path / "train.py"), "--flag"]


MEET = (
    "import os\n"
    "from manyhands import View, open_link\n"
    "with open_link() as link:\n"
    "    while True:\n"
    "        event = link.receive(30)\n"
    "        if isinstance(event, View) and len(event.roster) == 3:\n"
    "            break\n"
    "    print('met', *sorted(member.peer.name for member in event.roster))\n"
    "    link.send(None, b'seen')\n"
    "    seen = 0\n"
    "    while seen < 2:\n"
    "        seen += not isinstance(link.receive(30), View)\n"
)


def test_the_copies_meet_at_a_hub_of_their_own(launch):
    code, out, err = launch(MEET, "-n", "3").end()
    assert code == 0, err
    assert out.count("met") == 3


def test_others_come_in_by_the_command_that_is_printed(launch, tmp_path):
    """And find the run by the code alone. Only the owner of the hub prints it."""
    first = launch(MEET, "-n", "1")
    printed = b""
    while b"--hub" not in printed:
        printed = first.process.stderr.readline()
        assert printed
    shown = printed.decode().split()
    assert shown[:3] == ["manyhands", "run", "--hub"]
    assert shown[4] == str(tmp_path / "train.py")
    second = Launcher(tmp_path / "train.py", "--hub", shown[3], "-n", "2")
    try:
        code, out, err = second.end()
        assert code == 0, err
    finally:
        close(second.process)
    assert out.count("met") == 2
    assert shown[3] not in out + err
    assert "mh1-" not in out + err
    code, out, err = first.end()
    assert (code, out.count("met")) == (0, 1), err
    names = out.split()[1:]
    assert len(set(names)) == 3, names
    assert shown[3] not in err


def test_one_that_joins_begins_when_it_is_there(launch):
    with Hub("127.0.0.1:0") as hub:
        env = {**os.environ, "MANYHANDS_URL": hub.address.code()}
        code, out, err = launch(TELL, "-n", "2", "--run", "r", env=env).end()
    assert code == 0, err
    for lines in lines_of(out).values():
        told = json.loads(lines[0])["env"]
        assert told["MANYHANDS_URL"] == hub.address.code()
        assert (told["MANYHANDS_RUN"], told["MANYHANDS_MIN_PEERS"]) == ("r", "1")
        assert "MANYHANDS_WORLD_SIZE" not in told
    assert err == ""


def test_a_hub_that_serves_one_run_only(launch):
    with Hub("127.0.0.1:0", runs=frozenset({"r"})) as hub:
        code, _, err = launch(MEET.replace("== 3", "== 1").partition("    link.send")[0],
                              "--run", "r", "--hub", hub.address.code()).end()  # fmt: skip
    assert code == 0, err


def test_copies_do_not_go_by_the_advertised_address(launch):
    options = ("-n", "3", "--bind", "0.0.0.0:0", "--advertise", "nowhere.invalid:1")
    code, out, err = launch(MEET, *options).end()
    assert (code, out.count("met")) == (0, 3), err
    assert "hub at nowhere.invalid:1" in err
    assert "on other machines" in err


def test_secrets_are_not_on_command_lines(launch):
    launcher = launch(SLEEP, "-n", "2")
    launcher.ready(2)
    family = tree_of(launcher.process.pid)
    assert len(family) == 4  # the launcher, its guard, two copies
    for process in family[1:]:
        assert "mh1-" not in " ".join(process.cmdline())


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["-n", "0"], 2, ["'-n'"]),
        (["--min-peers", "0"], 2, ["--min-peers"]),
        (["--min-peers", "1000"], 2, ["1000 peers", "256", "hint:"]),
        (["-n", "257"], 2, ["257 peers"]),
        (["--run", "no spaces"], 2, ["run name", "hint:"]),
        (["--hub", "mh1-nonsense"], 2, ["join code", "copy the whole code"]),
        (["--hub", "hub://127.0.0.1:1/r"], 2, ["fingerprint and token"]),
        (["--hub", "hub://127.0.0.1:1?insecure=1"], 2, ["names no run", "--run NAME"]),
        (["--hub", "hub://127.0.0.1:1/r?insecure=1"], 1, ["no hub at 127.0.0.1:1", "hint:"]),
        (["--hub", "amqp://u:s3cret@127.0.0.1:1/?run=r"], 1, ["127.0.0.1:1"]),
        (["--hub", "local:///r"], 2, ["inside one process", "hint:"]),
        (["--hub", "hub://127.0.0.1:1/r?insecure=1", "--bind", ":1"], 2, ["--bind", "hint:"]),
        (["--bind", "127.0.0.1:none"], 2, ["port", "HOST:PORT"]),
        (["--bind", "192.0.2.1:7799"], 1, ["cannot listen", "hint:"]),
    ],
)
def test_errors_come_before_anything_starts(launch, tmp_path, options, code, words):
    ended, out, err = launch("open('started', 'w')", *options, cwd=tmp_path).end()
    assert ended == code, err
    assert out == ""
    assert all(word in err for word in words), err
    assert not (tmp_path / "started").exists()
    assert "s3cret" not in err


def test_a_script_that_is_not_there(tmp_path):
    launcher = Launcher(tmp_path / "tarin.py")
    try:
        code, _, err = launcher.end()
    finally:
        close(launcher.process)
    assert code == 2
    assert "tarin.py" in err


def test_an_address_in_use(launch):
    with Hub("127.0.0.1:0") as hub:
        code, _, err = launch(TELL, "--bind", f"127.0.0.1:{hub.address.port}").end()
    assert code == 1
    assert "Address already in use" in err


def test_a_wrong_token(launch):
    with Hub("127.0.0.1:0") as hub, Hub("127.0.0.1:0") as other:
        url = f"hub://127.0.0.1:{hub.address.port}/r?fingerprint={hub.address.fingerprint}"
        url += f"&token={other.address.token}"
        code, _, err = launch(TELL, "--hub", url).end()
    assert code == 1
    assert "token is wrong" in err
    assert other.address.token not in err


# -- output -----------------------------------------------------------------------------------


def test_lines_of_several_copies_stay_whole(launch):
    text = (
        "import os, sys\n"
        "me = os.environ['MANYHANDS_NAME'].encode()\n"
        "for i in range(300):\n"
        "    for piece in (me, b' says ', b'%d' % i, b' ' + b'x' * 500, b'\\n'):\n"
        "        os.write(1 + i % 2, piece)\n"
        "os.write(1, b'\\xff\\xfe no text\\n')\n"
        "os.write(1, b'no end')\n"
    )
    launcher = launch(text, "-n", "3", stderr=subprocess.STDOUT)
    out, _ = launcher.process.communicate(timeout=WAIT_S)
    assert launcher.process.returncode == 0
    seen = [line for line in out.split(b"\n") if line.startswith(b"[")]
    assert len(seen) == 3 * 302
    for line in seen[:-3]:
        if b"says" in line:
            assert re.fullmatch(rb"\[(\S+)\] \1 says \d+ x{500}", line), line
    assert sum(line.endswith(b"] \xff\xfe no text") for line in seen) == 3
    assert sum(line.endswith(b"] no end") for line in seen) == 3


def test_stdout_and_stderr_are_kept_apart(launch):
    text = "import sys\nprint('out')\nprint('err', file=sys.stderr)\n"
    code, out, err = launch(text, "-n", "2").end()
    assert code == 0
    assert lines_of(out) == {0: ["out"], 1: ["out"]}
    assert err.count("] err\n") == 2


def test_a_copy_alone_has_the_streams_of_the_launcher(launch):
    text = "import sys\nsys.stdout.write('\\r10% ' + input())\nsys.stderr.write('no end')\n"
    launcher = launch(text, stdin=subprocess.PIPE)
    out, err = launcher.process.communicate(b"typed\n", timeout=WAIT_S)
    assert launcher.process.returncode == 0
    assert out == b"\r10% typed"
    assert err.endswith(b"\nno end")


def test_a_worker_that_outlives_its_copy_holds_nobody_up(launch):
    text = (
        "import os, subprocess, sys\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('worker', worker.pid)\n"
        "os._exit(0)\n"
    )
    launcher = launch(text, "-n", "2")
    workers = [int(line.split()[-1]) for line in launcher.until(2, b"worker")]
    try:
        # Not to the end of its streams: the workers have them.
        assert launcher.process.wait(WAIT_S) == 0
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)


def test_events_for_programs(launch):
    text = (
        "import os, sys\n"
        "print('said')\n"
        "code = int(os.environ['MANYHANDS_NAME'][-1])\n"
        "os.kill(os.getpid(), 9) if code == 2 else sys.exit(4 * code)\n"
    )
    code, out, err = launch(text, "-n", "3", "--run", "r", "--json").end()
    events = [json.loads(line) for line in out.splitlines()]
    by_kind = {}
    for event in events:
        by_kind.setdefault(event.pop("event"), []).append(event)
    (run,) = by_kind["run"]
    assert run["run"] == "r"
    assert run["code"].startswith("mh1-")
    assert run["code"] not in err
    assert len(by_kind["started"]) == 3
    ends = {e["name"][-1]: (e["code"], e["signal"]) for e in by_kind["ended"]}
    assert ends == {"0": (0, None), "1": (4, None), "2": (None, "SIGKILL")}
    assert by_kind["done"] == [{"code": 4}]
    assert code == 4
    assert err.count("] said") == 3


def test_events_of_a_copy_alone(launch):
    code, out, err = launch("print('said')", "--json").end()
    assert code == 0
    kinds = [json.loads(line)["event"] for line in out.splitlines()]
    assert kinds == ["run", "started", "ended", "done"]
    assert err.endswith("said\n")


# -- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0], 0),
        ([0, 0, 0], 0),
        ([-9, 0], 0),
        ([0, -15, 0], 0),
        ([0, 3, 4], 3),
        ([-9, 3, 0], 3),
        ([3], 3),
        ([-9], 137),
        ([-15, -9], 143),
    ],
)
def test_exit_codes(codes, code):
    assert exit_code(codes) == code


def test_a_copy_that_dies_leaves_the_others_alone(launch, tmp_path):
    text = (
        "import os, sys, time\n"
        "me = os.environ['MANYHANDS_NAME'][-1]\n"
        "if me == '1':\n"
        "    print('first', file=sys.stderr)\n"
        "    raise SystemExit('out of luck')\n" + SAY_WHEN_READY + "sys.stdout.flush()\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
        "print('done')\n"
    )
    launcher = launch(text, "-n", "3", cwd=tmp_path)
    pids = launcher.ready(2)
    report = b""
    while b"ended with code 1; 2 left" not in report:  # at once, while the others go on
        report = launcher.process.stderr.readline()
        assert report
    assert report.split()[1].endswith(b"-1")
    os.kill(pids[0], signal.SIGKILL)
    while b"was ended by SIGKILL" not in report:
        report = launcher.process.stderr.readline()
        assert report
    (tmp_path / "go").touch()
    code, out, err = launcher.end()
    assert code == 1
    assert out.count("done") == 1
    assert re.search(r"1 of 3 got to the end; the first failure: \S+-1 ended with code 1\n", err)
    assert err.endswith("    first\n    out of luck\n")


def test_last_words_come_before_the_news_of_an_end(launch, tmp_path):
    """Also where the launcher learns of both at once, having waited for a reader of its own."""
    text = (
        "import os, sys, time\n"
        "def wait(file):\n"
        "    while not os.path.exists(file): time.sleep(0.02)\n"
        "me = os.environ['MANYHANDS_NAME'][-1]\n"
        "if me == '0':\n"
        "    os.write(1, b'x\\n' * 50_000)\n"  # more than a pipe holds, with its prefixes
        "os.symlink(str(os.getpid()), f'pid-{me}')\n"
        "wait(f'go-{me}')\n"
        "if me == '0':\n"
        "    sys.exit('last words')\n"
    )
    launcher = launch(text, "-n", "3", cwd=tmp_path)
    while len(list(tmp_path.glob("pid-*"))) < 3:
        time.sleep(0.02)
    for copy in "120":
        (tmp_path / f"go-{copy}").touch()
        assert wait_gone([int(os.readlink(tmp_path / f"pid-{copy}"))])
    code, out, err = launcher.end()
    assert (code, out.count("x\n")) == (1, 50_000)
    assert re.search(r"\] last words\nmanyhands: \S+-0 ended with code 1", err), err
    assert err.endswith("    last words\n")


# -- signals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "got", "code"),
    [
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGINT, "SIGINT", 130),
        (signal.SIGHUP, "SIGTERM", 129),
    ],
)
@pytest.mark.parametrize("number", [1, 2])
def test_a_signal_reaches_each_copy_once(launch, sent, got, code, number):
    launcher = launch(COUNT_SIGNALS, "-n", str(number))
    launcher.ready(number)
    launcher.process.send_signal(sent)
    ended, out, err = launcher.end()
    assert (ended, err.count("asked to leave")) == (code, 1), err
    assert [line.partition("got ")[2] for line in out.splitlines()] == [got] * number


ON_A_TERMINAL = """
import os, sys, fcntl, termios
fd = os.open(sys.argv[1], os.O_RDWR)      # the leader of a session gets it as its terminal
fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
for i in range(3):
    os.dup2(fd, i)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.fixture
def terminal(tmp_path):
    """Starts `manyhands run OPTIONS` of a script on a terminal of its own: it, and the terminal."""
    with contextlib.ExitStack() as stack:

        def start(text, *options):
            script = tmp_path / "train.py"
            script.write_text(text)
            ours, its = pty.openpty()
            stack.callback(os.close, ours)
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", ON_A_TERMINAL, os.ttyname(its)),
                    *("-c", MAIN.format(""), "run", *options, str(script)),
                ],
                start_new_session=True,
            )
            stack.callback(end_tree, process, patience_s=0)
            stack.callback(os.close, its)
            return process, ours

        yield start


def read_until(terminal, words, number):
    seen = b""
    while seen.count(words) < number:
        seen += os.read(terminal, 4096)
    return seen


@pytest.mark.parametrize("number", [1, 2])
def test_ctrl_c_reaches_each_copy_once(terminal, number):
    process, screen = terminal(COUNT_SIGNALS, "-n", str(number))
    read_until(screen, b"ready", number)
    os.write(screen, b"\x03")
    assert process.wait(WAIT_S) == 130
    seen = read_until(screen, b"got ", number)
    assert re.findall(rb"got ([^\r\n]*)", seen) == [b"SIGINT"] * number


def test_a_copy_alone_reads_from_the_terminal(terminal):
    """As breakpoint() does."""
    process, screen = terminal("print('read', input('what? '))")
    read_until(screen, b"what? ", 1)
    os.write(screen, b"this\n")
    read_until(screen, b"read this", 1)
    assert process.wait(WAIT_S) == 0


def test_a_second_signal_kills(launch):
    launcher = launch(DEAF, "-n", "2")
    pids = launcher.ready(2)
    launcher.process.terminate()
    said = b""
    while b"asked to leave" not in said:
        said = launcher.process.stderr.readline()
    launcher.process.terminate()
    code, _, err = launcher.end()
    assert code == 143
    assert "a second signal, SIGTERM: 2 killed" in err
    assert wait_gone(pids)


def test_two_hang_ups_are_one(launch):
    """A terminal that closes tells the shell, which tells its jobs, which the terminal told."""
    launcher = launch(COUNT_SIGNALS, "-n", "2")
    launcher.ready(2)
    launcher.process.send_signal(signal.SIGHUP)
    said = b""
    while b"asked to leave" not in said:
        said = launcher.process.stderr.readline()
    launcher.process.send_signal(signal.SIGHUP)
    code, out, _ = launcher.end()
    assert (code, out.count("got SIGTERM")) == (129, 2)


SHORT_GRACE = "import manyhands.cli.launch as launch; launch.GRACE_S = 0.5"


def test_who_does_not_leave_is_killed_with_its_workers(launch):
    worker = "import subprocess, sys\nw = subprocess.Popen([sys.executable, '-c', 'input()'],"
    worker += " stdin=subprocess.PIPE)\nprint('ready', w.pid, flush=True)\n"
    launcher = launch(worker + DEAF, "-n", "2", before=SHORT_GRACE)
    pids = launcher.ready(4)
    launcher.process.terminate()
    code, _, err = launcher.end()
    assert code == 143
    assert "not gone after 0.5 s: 2 killed" in err
    assert wait_gone(pids)


def test_nohup_is_heeded(launch):
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    launcher = launch(COUNT_SIGNALS, "-n", "2", before=ignored)
    launcher.ready(2)
    launcher.process.send_signal(signal.SIGHUP)
    launcher.process.send_signal(signal.SIGTERM)
    code, out, err = launcher.end()
    assert code == 143, err
    assert out.count("got SIGTERM") == 2


@pytest.mark.parametrize("both", [False, True])
def test_a_reader_that_does_not_read_keeps_no_signal_from_the_copies(launch, tmp_path, both):
    text = (
        f"import os\nopen(os.path.join({str(tmp_path)!r}, os.environ['MANYHANDS_NAME']), 'x')"
        ".write(str(os.getpid()))\nwhile True: print('x' * 1000)\n"
    )
    launcher = launch(
        text,
        *("-n", "2"),
        stderr=subprocess.STDOUT if both else subprocess.DEVNULL,
        env={**os.environ, "MANYHANDS_NAME": "copy"},
    )
    pipe = launcher.process.stdout.fileno()
    deadline_s = time.monotonic() + WAIT_S
    copies, waiting, steady = [], 0, 0
    while steady < STEADY or len(copies) < 2:  # how much a pipe takes depends on the pieces
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
        before, waiting = waiting, waiting_in(pipe)
        steady = steady + 1 if waiting == before > 0 else 0
        copies = [int(pid) for path in tmp_path.glob("copy-*") if (pid := path.read_text())]
    launcher.process.send_signal(signal.SIGTERM)
    assert wait_gone(copies)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(WAIT_S) == 128 + signal.SIGTERM


def test_a_full_disk_is_named(launch):
    with open("/dev/full", "wb") as full:
        launcher = launch(SLEEP, "-n", "2", stdout=full)
        _, err = launcher.process.communicate(timeout=WAIT_S)
    assert launcher.process.returncode == 128 + signal.SIGHUP
    assert b"stdout takes no more: No space left on device" in err


def test_arguments_that_are_no_text(launch):
    text = "import os, sys\nos.write(1, os.fsencode(sys.argv[1]))\n"
    launcher = launch(text, "-n", "2", arguments=[b"\xe9t\xe9"], stderr=subprocess.DEVNULL)
    out, _ = launcher.process.communicate(timeout=WAIT_S)
    assert (launcher.process.returncode, out.count(b"\xe9t\xe9")) == (0, 2)


def test_streams_that_came_closed(launch, tmp_path):
    """What is said must not go into whatever gets their numbers next: signals, for one."""
    text = f"import os\nopen(os.path.join({str(tmp_path)!r}, os.environ['MANYHANDS_NAME']), 'x')\n"
    launcher = launch(
        text + "print('hello')\n",
        *("-n", "2"),
        stdout=None,
        stderr=None,
        preexec_fn=lambda: os.closerange(0, 3),
        env={**os.environ, "MANYHANDS_NAME": "copy"},
    )
    assert launcher.process.wait(WAIT_S) == 0
    assert sorted(path.name for path in tmp_path.glob("copy-*")) == ["copy-0", "copy-1"]


def test_when_nobody_reads_any_more(launch, tmp_path):
    """As `manyhands run ... | head` does: all are asked to leave."""
    text = COUNT_SIGNALS.replace("while not got: time.sleep(0.02)", "while not got: print('more')")
    text += "open(f'left-{os.getpid()}', 'w')\n"
    launcher = launch(text, "-n", "2", cwd=tmp_path)
    launcher.ready(2)
    launcher.process.stdout.close()
    assert launcher.process.wait(WAIT_S) == 129
    assert b"2 asked to leave" in launcher.process.stderr.read()
    assert len(list(tmp_path.glob("left-*"))) == 2


# -- the launcher dies ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_a_launcher_that_is_killed_takes_its_copies_along(launch, tmp_path, number):
    text = COUNT_SIGNALS.replace("print('got', *got)", "open(f'{got}-{os.getpid()}', 'w')")
    launcher = launch(text, "-n", str(number), cwd=tmp_path)
    pids = launcher.ready(number)
    family = tree_of(launcher.process.pid)
    launcher.process.kill()
    launcher.process.wait()
    assert wait_gone(pids)
    assert wait_gone([process.pid for process in family])  # its guard too
    assert len(list(tmp_path.glob("*SIGTERM*"))) == number  # they were asked


def test_a_copy_in_a_long_call(launch):
    launcher = launch(SLEEP, "-n", "2")
    pids = launcher.ready(2)
    launcher.process.kill()
    assert wait_gone(pids)


def test_a_copy_that_is_stopped(launch):
    launcher = launch(SLEEP, "-n", "2")
    pids = launcher.ready(2)
    os.kill(pids[0], signal.SIGSTOP)
    launcher.process.kill()
    assert wait_gone(pids)


def test_a_copy_that_does_not_listen_and_its_worker(launch):
    text = "import subprocess\nw = subprocess.Popen(['sleep', '600'])\nprint('ready', w.pid)\n"
    launcher = launch(text + DEAF, before=SHORT_GRACE)
    pids = launcher.ready(2)
    launcher.process.kill()
    assert wait_gone(pids)


def test_a_copy_that_became_another_program(launch):
    launcher = launch("import os\n" + SAY_WHEN_READY + "os.execvp('sleep', ['sleep', '600'])\n")
    pids = launcher.ready(1)
    launcher.process.kill()
    assert wait_gone(pids)


def test_a_copy_that_has_only_just_begun(launch):
    """Killed when the first process is there, whatever it has come to."""
    launcher = launch(SLEEP, "-n", "3")
    while not launcher.process.poll() and len(family := tree_of(launcher.process.pid)) < 3:
        pass
    launcher.process.kill()
    launcher.process.wait()
    assert wait_gone([process.pid for process in family])


def test_one_that_ended_before_is_forgotten(launch):
    """Its id may be another's by then: here, that of a worker it left behind in its group."""
    text = (
        "import os, subprocess, sys\n"
        "if os.environ['MANYHANDS_NAME'].endswith('0'):\n"
        "    w = subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3)\n"
        "    print('worker', w.pid)\n"
        "    sys.exit(3)\n" + SLEEP
    )
    launcher = launch(text, "-n", "2")
    pids = {}
    while len(pids) < 2:
        _, word, pid = launcher.process.stdout.readline().split()
        pids[word] = int(pid)
    said = b""
    while b"ended with code 3" not in said:
        said = launcher.process.stderr.readline()
    try:
        (guard,) = [p.pid for p in tree_of(launcher.process.pid)[1:] if p.pid != pids[b"ready"]]
        launcher.process.kill()
        assert wait_gone([pids[b"ready"], guard])
        assert alive(pids[b"worker"])
    finally:
        os.kill(pids[b"worker"], signal.SIGKILL)


def test_a_guard_outlives_what_is_meant_for_all(launch):
    """A service manager signals every process of a service."""
    launcher = launch(SLEEP, "-n", "2")
    pids = launcher.ready(2)
    (guard,) = [p for p in tree_of(launcher.process.pid)[1:] if p.pid not in pids]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        guard.send_signal(number)
    launcher.process.kill()
    assert wait_gone(pids)


def test_a_hub_that_fails_in_the_launcher(launch):
    fail = "from manyhands.links.hub import Hub; Hub._tick = lambda self: 1 / 0"
    launcher = launch(COUNT_SIGNALS, "-n", "2", before=fail)
    out, err = launcher.process.communicate(timeout=WAIT_S)
    assert launcher.process.returncode == 1
    assert b"error: the hub in this process failed (ZeroDivisionError); its error is above" in err
    assert out.count(b"got SIGTERM") + err.count(b"was ended by SIGTERM") == 2


def test_the_hub_stays_while_others_are_in_the_run(launch, tmp_path):
    text = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    launcher = launch(text, "--json", cwd=tmp_path)
    with open_link(json.loads(launcher.until(1, b"mh1-")[-1])["code"]) as link:
        assert isinstance(link.receive(WAIT_S), View)
        (tmp_path / "go").touch()
        said = b""
        while b"others are in the run" not in said:
            said = launcher.process.stderr.readline()
            assert said
        link.renew_lease(WAIT_S)
        assert launcher.process.poll() is None
    code, out, _ = launcher.end()
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == {"event": "done", "code": 0}


def test_the_hub_does_not_stay_for_the_dead(launch):
    """Their leases may run on, but nobody will come back."""
    text = (
        "import os, signal\nfrom manyhands import LinkSettings, Terms, open_link\n"
        "terms = Terms(beat_s=20.0, lease_s=600.0)\n"
        "link = open_link(settings=LinkSettings(terms=terms))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code, _, err = launch(text).end()
    assert code == 137
    assert "was ended by SIGKILL" in err
    assert "others are in" not in err


def test_a_hub_that_stays_goes_by_ctrl_c(launch, tmp_path):
    text = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    launcher = launch(text, "--json", cwd=tmp_path)
    with open_link(json.loads(launcher.until(1, b"mh1-")[-1])["code"]):
        (tmp_path / "go").touch()
        said = b""
        while b"others are in the run" not in said:
            said = launcher.process.stderr.readline()
            assert said
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.end()[0] == 130


@pytest.mark.parametrize("is_heard", [True, False])  # False: stderr is a closed terminal
def test_a_hub_that_fails_in_a_thread_stops_the_launcher(monkeypatch, is_heard):
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())

    def hook(_):
        if not is_heard:
            raise OSError("no terminal")

    monkeypatch.setattr(threading, "excepthook", hook)
    thread = threading.Thread(target=lambda: 1 / 0)
    failed = pytest.raises(ManyhandsError, match=r"failed \(ZeroDivisionError\)")
    try:
        with failed, own_hub("127.0.0.1:0", None):
            thread.start()
            thread.join()
            assert asked.wait(10)
    finally:
        signal.signal(signal.SIGTERM, before)
