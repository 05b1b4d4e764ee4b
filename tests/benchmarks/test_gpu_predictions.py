"""Predictions of the GPU benchmark: what refutes them, and what the run prints."""

from __future__ import annotations

import pytest

from benchmarks.gpu import PARTS
from benchmarks.gpu_parts.rig.prediction import Prediction, line, point_figure

ANSWER = {"points": [{"batch": 1, "us": 5.0}, {"batch": 8, "us": 100.0}, {"batch": 8, "us": 7.0}]}


@pytest.mark.parametrize(
    ("at_least", "at_most", "verdict"),
    [(None, 100.0, "CONFIRMED"), (None, 99.0, "REFUTED"), (100.0, None, "CONFIRMED"), (101.0, 200.0, "REFUTED")],
)
def test_a_figure_beyond_a_bound_refutes(at_least: float | None, at_most: float | None, verdict: str) -> None:
    prediction = Prediction("decode", "95 to 120 us", point_figure("us", batch=8), at_least, at_most)
    judged = prediction.judge(ANSWER)
    assert (judged["figure"], judged["verdict"]) == (100.0, verdict)


def test_not_a_number_refutes() -> None:
    judged = Prediction("decode", "1 us", lambda answer: float("nan"), at_most=1.0).judge({})
    assert judged["verdict"] == "REFUTED"


def test_a_figure_that_is_not_there_is_not_measured() -> None:
    judged = Prediction("decode", "1 us", point_figure("us", batch=64), at_most=1.0).judge(ANSWER)
    assert (judged["figure"], judged["verdict"]) == (None, "NOT MEASURED")


def test_the_line_has_figure_prediction_and_bound() -> None:
    judged = Prediction("decode", "95 to 120 us", point_figure("us", batch=8), at_most=150.0).judge(ANSWER)
    assert line(judged) == "CONFIRMED    decode: 100 (predicted 95 to 120 us, refuted above 150)"


def test_a_prediction_that_nothing_could_refute_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing could refute"):
        Prediction("decode", "fast", lambda answer: 1.0)


def test_names_of_predictions_occur_once() -> None:
    names = [prediction.name for part in PARTS for prediction in part.predictions]
    assert len(names) == len(set(names)) > 0
