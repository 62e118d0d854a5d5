"""Peers split a round by the speed that each has measured of itself."""

from __future__ import annotations

import time

from torch.utils.data import DataLoader

from tests.replica.loops import Points, Recipe, compare, mean_loss

SIZE, BATCH, GRAIN, EPOCHS = 144, 48, 4, 5  # twelve grains a round, fifteen rounds
LAST = 5  # rounds, when shares follow what was measured
# Of the slow peer, for each grain that it computes: that is what it measures. Much longer than a
# grain takes, also on a machine that has other things to do.
PACE_S = 0.08
SLOW = 0


def test_who_computes_faster_gets_more():
    units: list[dict[str, int]] = []

    def loop(hand, model, optimizer, loader, scheduler):
        if not hand.alone and hand.name == SLOW:
            hand.on_round(
                lambda closed: units.append({p.name: len(r) for p, r in closed.shares.items()})
            )
        for _ in range(EPOCHS):
            for batch in loader:
                optimizer.zero_grad()
                loss = mean_loss(model, batch)
                if not hand.alone and hand.name == SLOW:
                    time.sleep(PACE_S)
                mean = hand.mean(loss)
                loss.backward()
                hand.learnt(mean)
                optimizer.step()

    options = {"shares": "speed", "grain_size": GRAIN}
    data = DataLoader(Points(SIZE), BATCH, shuffle=True)
    recipe = Recipe(loop, data=lambda: data, epochs=EPOCHS, options=options)
    compare(recipe, (1, 1))  # both begin with as much
    assert [sum(round_.values()) for round_ in units] == [BATCH // GRAIN] * (3 * EPOCHS)
    slow, fast = (sum(r.get(f"peer-{n}", 0) for r in units[-LAST:]) for n in (SLOW, 1 - SLOW))
    assert fast >= 1.5 * slow, units
