"""Losses that are means over something else than rows: tokens that are not ignored, say."""

import copy

import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh

WORDS, LENGTH, IGNORED = 7, 5, -100
TOKENS = torch.randint(WORDS, (9, LENGTH), generator=torch.Generator().manual_seed(3))
TARGETS = TOKENS.roll(-1, 1)
for row in range(9):  # rows of very different lengths, one of them without any
    TARGETS[row, max(0, LENGTH - row) :] = IGNORED


def build():
    torch.manual_seed(0)
    made = [nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, WORDS)]
    return [layer.double() for layer in made]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def of_tokens(scores, targets):
    loss = F.cross_entropy(
        scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, (targets != IGNORED).sum()


def plain(clip):
    """torch's own mean, over the whole batch at once."""
    model = nn.Sequential(*build())
    optimizer, losses = sgd(model.parameters()), []
    for _ in range(3):
        scores = model(TOKENS)
        loss = F.cross_entropy(scores.flatten(0, 1), TARGETS.flatten(), ignore_index=IGNORED)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model


def on_all(plan, act, **options):
    made = build()
    models = [copy.deepcopy(made) for _ in plan.peers]
    given = {"loss_fn": of_tokens, "loss_is": "counted", "optimizer": sgd} | options

    def body(carrier):
        pipe = mh.Pipeline(models[carrier.rank], plan, group=carrier, **given)
        return act(pipe), {layer.index: layer.module for layer in pipe.layers()}

    return run_threads(len(plan.peers), body)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("targets", ["first", "last"])
@pytest.mark.parametrize(
    "plan",
    [
        mh.Plan.even(4, 1),
        mh.Plan.even(4, 1, microbatches=4),
        mh.Plan.even(4, 2, microbatches=4),
        mh.Plan.even(4, 2, microbatches=9, stages_per_peer=2),
        mh.Plan.even(4, 2, microbatches=4, recompute=True),
        mh.Plan.of_stages([(2, [0]), (2, [0, 1], [2, 1])], microbatches=3),
        mh.Plan.of_stages([(1, [0]), (3, [1, 2])], microbatches=2, recompute=True),
    ],
    ids=str,
)
def test_any_plan_gives_the_mean_over_all_tokens(plan, targets, clip):
    losses, model = plain(clip)

    def act(pipe):
        return [pipe.step(TOKENS, TARGETS) for _ in losses] + [pipe.evaluate(TOKENS, TARGETS)]

    scores = model(TOKENS).flatten(0, 1)
    wanted = float(F.cross_entropy(scores, TARGETS.flatten(), ignore_index=IGNORED).detach())
    for found, layers in on_all(plan, act, targets=targets, clip_norm=clip):
        assert found == pytest.approx([*losses, wanted], rel=1e-9)
        for index, layer in layers.items():
            for name, value in layer.state_dict().items():
                torch.testing.assert_close(
                    value, model[index].state_dict()[name], rtol=1e-9, atol=0
                )


def test_a_mean_over_rows_would_have_been_another():
    """So that the test above can fail: lengths differ from microbatch to microbatch."""

    def mean(scores, targets):
        loss, count = of_tokens(scores, targets)
        return loss / count.clamp(min=1)

    plan = mh.Plan.even(4, 1, microbatches=4)
    ((found, _),) = on_all(plan, lambda p: p.step(TOKENS, TARGETS), loss_fn=mean, loss_is="mean")
    assert abs(found - plain(None)[0][0]) > 1e-3


def test_a_batch_in_which_nothing_counts_is_refused_by_all_and_changes_nothing():
    def act(pipe):
        before = [p.clone() for layer in pipe.layers() for p in layer.module.parameters()]
        with pytest.raises(mh.ManyhandsError, match="nothing to average over") as caught:
            pipe.step(TOKENS, torch.full_like(TARGETS, IGNORED))
        after = [p for layer in pipe.layers() for p in layer.module.parameters()]
        assert all(map(torch.equal, before, after))
        assert all(p.grad is None for p in after)
        assert pipe.num_steps == 0
        return str(caught.value), pipe.step(TOKENS, TARGETS)

    for plan in (mh.Plan.even(4, 1), mh.Plan.even(4, 2, microbatches=3)):
        found = on_all(plan, act)
        assert len({said for (said, _), _ in found}) == 1
        for (_, loss), _ in found:
            assert loss == pytest.approx(plain(None)[0][0], rel=1e-9)


def test_a_count_may_be_a_number():
    plan = mh.Plan.even(4, 2, microbatches=2)
    found = on_all(
        plan,
        lambda pipe: pipe.step(TOKENS, TARGETS),
        loss_fn=lambda s, t: (of_tokens(s, t)[0], int((t != IGNORED).sum())),
    )
    for loss, _ in found:
        assert loss == pytest.approx(plain(None)[0][0], rel=1e-9)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda loss: loss, "the loss is tensor"),
        (lambda loss: (loss, loss, loss), "the loss is "),
        (lambda loss: (loss, "three"), "the loss is over 'three'"),
        (lambda loss: (loss, torch.ones(2)), "the loss is over tensor"),
        (lambda loss: (1.0, 3), "the loss is 1.0"),
    ],
)
def test_what_is_no_sum_and_count(made, said):
    def act(pipe):
        with pytest.raises(mh.StepFailed, match=said) as caught:
            pipe.step(TOKENS, TARGETS)
        assert "hint: " in str(caught.value)

    on_all(mh.Plan.even(4, 2), act, loss_fn=lambda s, t: made(of_tokens(s, t)[0]))


@pytest.mark.parametrize("options", [{"loss_is": "average"}, {"targets": "both"}])
def test_words_that_mean_nothing(options):
    (name, given), *_ = options.items()
    with pytest.raises(mh.ManyhandsError, match=f"{name}='{given}'"):
        mh.Pipeline(build(), mh.Plan.even(4, 1), **options)
