"""Trainers as real processes at a real broker, compared with one process."""

from __future__ import annotations

import shlex

import amqp
import pytest

from manyhands.compat import deepbooster
from manyhands.links.amqp.queues import limited_user, look, post, set_up
from tests.compat.deepbooster.crew import Crew, check_close, random_lines, train_alone, write_chunk


@pytest.fixture(autouse=True)
def _first(context, broker):
    """Before the leak check of a test looks."""


def chunks_for(folder, *nums):
    chunks = [random_lines(100 + k, num) for k, num in enumerate(nums)]
    for k, lines in enumerate(chunks):
        write_chunk(folder / f"chunk{k}.jsonl", lines)
    return chunks


def test_unequal_chunks_are_weighted_by_lines(new_crew, tmp_path):
    chunks = chunks_for(tmp_path, 3, 1, 0)
    with new_crew(3) as crew:
        crew.ignite(0, 1)  # before they start: it counts
        trainers = [crew.start(k) for k in range(3)]
        crew.ignite(2)
        results = [trainer.result() for trainer in trainers]
        for trainer in trainers:
            trainer.end()
        expected = train_alone(crew.options(0), chunks, 2)
    for report, weights in results:
        assert weights == results[0][1]  # to the bit
        assert report == {"epochs": 2, "steps": 6, "lost": (), "skipped": ()}
    check_close(results[0][1], expected)


def test_a_trainer_that_is_killed_stops_nobody_and_its_lines_are_reported(new_crew, tmp_path):
    """It dies in its third line; whoever starts it again is told what has become of it."""
    chunks = chunks_for(tmp_path, 4, 3, 4)
    with new_crew(3) as crew:
        crew.ignite()
        trainers = [crew.start(0), crew.start(1, stops=[2]), crew.start(2, stops=[2])]
        trainers[1].until("seen", 2)
        trainers[2].until("seen", 2)
        trainers[2].kill()
        crew.ignite(2)
        again = crew.start(2)  # while the others are still at it
        assert again.until("error") == "TrainingBegun"
        assert "have begun without" in again.said[-1]["text"]
        again.end()
        trainers[1].go()
        results = [trainer.result() for trainer in trainers[:2]]
        for trainer in trainers[:2]:
            trainer.end()
            assert "6 lines of " in trainer.log
        expected = train_alone(crew.options(0), chunks, 2, until={2: 2})
    lost = {
        "trainer": crew.queues[2],
        "chunk": str(tmp_path / "chunk2.jsonl"),
        "untrained": 2 + 4,
        "epoch": 0,
        "line": 2,
    }
    for report, weights in results:
        assert weights == results[0][1]
        assert report == {"epochs": 2, "steps": 8, "lost": (lost,), "skipped": ()}
    check_close(results[0][1], expected)


def test_a_broker_that_restarts_in_the_middle_of_a_step(context, fresh_broker, tmp_path):
    """Nothing is lost: it is as if the broker had always been there."""
    chunks, broker = chunks_for(tmp_path, 4, 3), fresh_broker()
    with Crew(context, broker, tmp_path, 2) as crew:
        crew.ignite()
        trainers = [crew.start(k, stops=[2]) for k in range(2)]
        for trainer in trainers:
            trainer.until("seen", 2)
        broker.restart()
        for trainer in trainers:
            trainer.go()
        results = [trainer.result() for trainer in trainers]
        for trainer in trainers:
            trainer.end()
        expected = train_alone(crew.options(0), chunks, 2)
    for report, weights in results:
        assert weights == results[0][1]
        assert report == {"epochs": 2, "steps": 8, "lost": (), "skipped": ()}
    check_close(results[0][1], expected)


def test_the_longest_chunk_dies_and_the_epoch_ends_earlier(new_crew, tmp_path):
    chunks = chunks_for(tmp_path, 1, 5)
    with new_crew(2) as crew:
        crew.ignite()
        trainers = [crew.start(0), crew.start(1, stops=[2])]
        trainers[1].until("seen", 2)
        trainers[1].kill()
        report, weights = trainers[0].result()
        trainers[0].end()
        (lost,) = report["lost"]
        # The dead one may have been the only one to see the end of its second step.
        trained = 2 * 5 - lost["untrained"]
        assert trained in (1, 2)
        expected = train_alone(crew.options(0), chunks, 2, until={1: trained})
    assert report["epochs"] == 2
    assert report["steps"] in {trained + 1, 3}  # two lines or one, then one; or a step without any
    check_close(weights, expected)


def test_the_users_own_error_is_the_users_and_the_others_go_on(new_crew, tmp_path):
    chunks_for(tmp_path, 2, 2)
    with new_crew(2) as crew:
        crew.ignite()
        trainers = [crew.start(0), crew.start(1, fails=1, stops=[1])]
        trainers[0].until("seen", 1)  # the first step is done there too
        trainers[1].go()
        assert trainers[1].until("error") == "RuntimeError"
        trainers[1].end()
        report, _ = trainers[0].result()
        trainers[0].end()
    assert [lost["untrained"] for lost in report["lost"]] == [1 + 2]


def test_two_trainers_on_one_my_queue(new_crew, tmp_path):
    chunks_for(tmp_path, 1)
    with new_crew(1) as crew:
        first = crew.start(0, stops=[0])
        crew.ignite()
        first.until("seen", 0)
        other = {"ignition_queue": f"{crew.ignitions[0]}-other"}
        second = crew.start(0, trainer=other)
        assert second.until("error") == "QueueInUse"
        assert crew.queues[0] in second.said[-1]["text"]
        second.end()
        first.go()  # and it is none the worse for it
        report, _ = first.result()
        first.end()
    assert report["steps"] == 2


def test_one_training_after_the_other(new_crew, tmp_path):
    """In the same processes, at once: some may still be on their way out of the first."""
    chunks = chunks_for(tmp_path, 2, 1)
    with new_crew(2) as crew:
        crew.ignite()
        crew.ignite()  # each start takes one message
        trainers = [crew.start(k, trainings=2) for k in range(2)]
        for trainer in trainers:
            trainer.result()
        results = [trainer.result() for trainer in trainers]
        for trainer in trainers:
            trainer.end()
        expected = train_alone(crew.options(0), chunks, 4)
    assert results[0] == results[1]
    check_close(results[0][1], expected)


def test_a_line_whose_gradient_is_not_finite_is_left_out(new_crew, tmp_path):
    chunks = chunks_for(tmp_path, 2, 2)
    bad = ([[float("nan")] * 3] * 5, chunks[1][0][1])
    write_chunk(tmp_path / "chunk1.jsonl", [bad, chunks[1][1]])
    with new_crew(2) as crew:
        crew.ignite()
        trainers = [crew.start(k, n_epoch=1) for k in range(2)]
        results = [trainer.result() for trainer in trainers]
        for trainer in trainers:
            trainer.end()
        expected = train_alone(crew.options(0), [chunks[0], [None, chunks[1][1]]], 1)
    skipped = [(one["trainer"], one["epoch"], one["line"]) for one in results[0][0]["skipped"]]
    assert skipped == [(crew.queues[1], 0, 0)]
    assert results[0] == results[1]
    check_close(results[0][1], expected)


def test_statistics_of_the_model_are_averaged_too(new_crew, tmp_path):
    chunks_for(tmp_path, 2, 1)
    with new_crew(2) as crew:
        crew.ignite()
        trainers = [crew.start(k, norm=True, optimizer="sgd") for k in range(2)]
        results = [trainer.result() for trainer in trainers]
        for trainer in trainers:
            trainer.end()
    weights = [{k: v for k, v in w.items() if "num_batches" not in k} for _, w in results]
    assert weights[0] == weights[1]
    assert weights[0]["norm.running_mean"] != [0.0] * 4


@pytest.mark.parametrize("other", [{"frozen": 2}, {"n_epoch": 3}, {"optimizer": "sgd"}])
def test_trainers_that_do_not_fit_together(new_crew, tmp_path, other):
    chunks_for(tmp_path, 1, 1)
    with new_crew(2) as crew:
        crew.ignite()
        trainers = [crew.start(0), crew.start(1, **other)]
        for trainer in trainers:
            assert trainer.until("error") == "TrainingBroken"
            assert f"{crew.queues[1]} cannot train with" in trainer.said[-1]["text"]
            trainer.end()


def test_the_queues(new_crew, tmp_path):
    """`start` purges the sync queue alone, and takes one message from the ignition queue."""
    chunks_for(tmp_path, 1)
    with new_crew(1) as crew:
        queues = [crew.ignitions[0], crew.queues[0]]
        set_up(crew.login, queues)
        post(crew.login, {crew.queues[0]: b"old"})
        post(crew.login, {crew.queues[0]: b"older"})
        crew.ignite()
        crew.ignite()
        trainer = crew.start(0)
        trainer.result()
        trainer.end()
        found = look(crew.login, queues)
        assert [found[name].messages for name in queues] == [1, 0]
        assert [found[name].consumers for name in queues] == [0, 0]


def test_a_message_straight_to_the_queue_ignites_too(new_crew, tmp_path):
    """As any program may send it: by the default exchange, with properties, and no path."""
    chunks_for(tmp_path, 1)
    with new_crew(1) as crew:
        trainer = crew.start(0)
        set_up(crew.login, [crew.ignitions[0]])
        port = crew.login.port
        with amqp.Connection(f"127.0.0.1:{port}", "guest", "guest") as connection:
            message = amqp.Message(
                "x" * 100_000, content_type="text/plain", application_headers={"a": {"b": 1.5}}
            )
            connection.channel().basic_publish(message, "", crew.ignitions[0])
        report, _ = trainer.result()
        assert not report["lost"]
        assert report["steps"] > 0
        trainer.end()


def test_a_limited_user_can_train(broker, new_crew, tmp_path):
    chunks_for(tmp_path, 1)
    with new_crew(1) as crew:
        user = f"limited-{crew.queues[0]}"
        queues = [crew.queues[0], crew.ignitions[0]]
        for line in limited_user("/", user, queues):
            words = shlex.split(line)[1:]
            broker.ctl(*words, *(["password"] if words[0] == "add_user" else []))
        crew.ignite()
        trainer = crew.start(0, trainer={"url_parameters": broker.url(user, "password")})
        report, _ = trainer.result()
        assert not report["lost"]
        assert report["steps"] > 0
        trainer.end()


class TestLauncher:
    def test_a_trainer_uses_the_chunk_that_it_is_sent(self, new_crew, tmp_path):
        lines = random_lines(7, 5)
        data = write_chunk(tmp_path / "all.jsonl", lines)
        with new_crew(2) as crew:
            trainers = [crew.start(k, trainer={"chunk_path": None}) for k in range(2)]
            chunks = deepbooster.Launcher(crew.ignitions, crew.url).launch(data)
            assert chunks == [tmp_path / "0.chunk", tmp_path / "1.chunk"]
            results = [trainer.result() for trainer in trainers]
            for trainer in trainers:
                trainer.end()
            expected = train_alone(crew.options(0), [lines[::2], lines[1::2]], 2)
        assert results[0] == results[1]
        check_close(results[0][1], expected)

    def test_a_message_that_is_no_path(self, new_crew):
        with new_crew(1) as crew:
            crew.ignite(body=b"/nowhere/at/all")
            trainer = crew.start(0, trainer={"chunk_path": None})
            assert trainer.until("error") == "ChunkError"
            assert "/nowhere/at/all" in trainer.said[-1]["text"]
            trainer.end()

    def test_launched_twice(self, broker, new_crew, tmp_path):
        data = write_chunk(tmp_path / "all.jsonl", random_lines(7, 5))
        with new_crew(2) as crew:
            launcher = deepbooster.Launcher(crew.ignitions, crew.url)
            chunks = launcher.launch(data)
            before = [chunk.read_bytes() for chunk in chunks]
            assert launcher.launch(data) == chunks
            assert [chunk.read_bytes() for chunk in chunks] == before
            assert sorted(path.name for path in tmp_path.iterdir()) == [
                *("0.chunk", "1.chunk", "all.jsonl")
            ]
            assert look(crew.login, crew.ignitions)[crew.ignitions[0]].messages == 2

    def test_with_a_broken_line_nothing_happens(self, new_crew, tmp_path):
        data = tmp_path / "all.jsonl"
        data.write_text('{"input": 1, "label": 2}\n\n{"input": 1}\n')
        with new_crew(2) as crew:
            with pytest.raises(deepbooster.ChunkError, match=r"all\.jsonl:3: without label"):
                deepbooster.Launcher(crew.ignitions, crew.url).launch(data)
            found = look(crew.login, crew.ignitions)
        assert [state.messages for state in found.values()] == [0, 0]
        assert [path.name for path in tmp_path.iterdir()] == ["all.jsonl"]
