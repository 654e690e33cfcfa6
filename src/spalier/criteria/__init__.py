"""What each channel is worth: criteria, and the scores that they give."""

from spalier.criteria.criterion import (
    ActivationCriterion,
    Criterion,
    Gradient,
    Magnitude,
    Movement,
    Random,
    SecondOrder,
    Taylor,
    Weight,
    WeightCriterion,
)
from spalier.criteria.lrp import LRP
from spalier.criteria.probe import Probe
from spalier.criteria.score import CRITERIA, Scores, score

__all__ = ["CRITERIA", "LRP", "ActivationCriterion", "Criterion", "Gradient", "Magnitude", "Movement", "Probe"]
__all__ += ["Random", "Scores", "SecondOrder", "Taylor", "Weight", "WeightCriterion", "score"]
