"""A carrier between threads of one process: many plans in little time, beside the real ones."""

import queue
import threading

import torch


class Switch:
    """What the carriers of some threads share."""

    def __init__(self, size):
        self.size = size
        self.lines = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
        self.lock = threading.Lock()
        self.meetings = {}
        self.count = {}


class Now:
    def wait(self):
        pass


class Later:
    def __init__(self, act):
        self.act = act

    def wait(self):
        self.act()


class ThreadCarrier:
    words_on = torch.device("cpu")

    def __init__(self, switch, rank, timeout_s=60.0):
        self.switch, self.rank, self.size = switch, rank, switch.size
        self.timeout_s = timeout_s
        self.num_sent = self.num_received = 0

    def prepare(self, peers, pairs):
        pass

    def send(self, tensor, to):
        assert to != self.rank
        self.switch.lines[self.rank, to].put(tensor.detach().clone())
        self.num_sent += 1
        return Now()

    def receive(self, tensor, sender):
        line = self.switch.lines[sender, self.rank]
        got = []
        self.num_received += 1

        # Receives of one line are waited for in any order, and matched in the order of asking.
        pending = self.switch.meetings.setdefault(("asked", sender, self.rank), [])
        pending.append((tensor, got))

        def act():
            while not got:
                target, mark = pending.pop(0)
                came = line.get(timeout=self.timeout_s)
                assert came.shape == target.shape, (came.shape, target.shape)
                assert came.dtype == target.dtype
                with torch.no_grad():
                    target.copy_(came)
                mark.append(True)

        return Later(act)

    def _meet(self, kind, peers, value):
        peers = tuple(sorted(peers))
        with self.switch.lock:
            number = self.switch.count[kind, peers, self.rank] = (
                self.switch.count.get((kind, peers, self.rank), 0) + 1
            )
            meeting = self.switch.meetings.setdefault(
                (kind, peers, number), (threading.Barrier(len(peers)), {})
            )
        barrier, values = meeting
        values[self.rank] = value
        barrier.wait(self.timeout_s)
        return values

    def sum(self, tensor, peers):
        values = self._meet("sum", peers, tensor.clone())
        tensor.copy_(sum(values[rank] for rank in sorted(values)))
        return Now()

    def spread(self, tensor, root, peers):
        tensor.copy_(self._meet("spread", peers, tensor.clone())[root])
        return Now()

    def say(self, words, root):
        return self._meet("say", range(self.size), words)[root]

    def give_up(self, reason):
        pass


def run_threads(size, act):
    """act(carrier) on each thread; returns their results, or raises the first error."""
    switch = Switch(size)
    results, errors = [None] * size, [None] * size

    def target(rank):
        try:
            results[rank] = act(ThreadCarrier(switch, rank))
        except BaseException as error:  # noqa: BLE001
            errors[rank] = error

    threads = [threading.Thread(target=target, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lost = [e for e in errors if e is not None]
    # A peer that fails leaves the others waiting: its error is the cause.
    for error in lost:
        if not isinstance(error, (threading.BrokenBarrierError, queue.Empty)):
            raise error
    if lost:
        raise lost[0]
    assert not any(line.qsize() for line in switch.lines.values()), "messages nobody took"
    return results
