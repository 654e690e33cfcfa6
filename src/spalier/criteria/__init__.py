"""What each channel is worth: criteria, and the scores that they give."""

from spalier.criteria.activations import Gradient, Taylor
from spalier.criteria.criterion import ActivationCriterion, Criterion, WeightCriterion
from spalier.criteria.lrp import LRP
from spalier.criteria.movement import Movement, record_movement
from spalier.criteria.probe import Probe
from spalier.criteria.score import CRITERIA, score
from spalier.criteria.scores import Scores
from spalier.criteria.second_order import SecondOrder
from spalier.criteria.simple import Magnitude, Random, Weight

__all__ = [
    "CRITERIA",
    "LRP",
    "ActivationCriterion",
    "Criterion",
    "Gradient",
    "Magnitude",
    "Movement",
    "Probe",
    "Random",
    "Scores",
    "SecondOrder",
    "Taylor",
    "Weight",
    "WeightCriterion",
    "record_movement",
    "score",
]
