"""What loggers get of a training that ends in the middle of something."""

from __future__ import annotations

import pytest

from tests.trainer.test_options import ROUNDS, Quiet, fit, maker


def test_a_row_whose_evaluation_has_failed_is_not_logged():
    """Whoever goes on with that round logs it, with all that belongs to it."""

    def fails(model):
        raise ZeroDivisionError("no sample")

    quiet = Quiet()
    with pytest.raises(ZeroDivisionError):
        fit(maker(evaluate=fails, loggers=[quiet]), evaluation=None)
    assert [step for step, _ in quiet.rows] == list(range(ROUNDS - 1))
    assert quiet.ends == ["failed"]
