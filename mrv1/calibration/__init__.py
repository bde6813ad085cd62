"""Calibration of head policies: how much a model's loss on prompts rises when heads stream."""

from mrv1.calibration.forward import PolicyModel
from mrv1.calibration.losses import Losses, measure
from mrv1.calibration.options import CalibrateOptions
from mrv1.calibration.plot import plot_ranking
from mrv1.calibration.prompts import Texts, load_texts
from mrv1.calibration.run import Calibration, calibrate
from mrv1.calibration.tasks import TASKS, TaskPrompts, TaskSample

__all__ = [
    "TASKS",
    "CalibrateOptions",
    "Calibration",
    "Losses",
    "PolicyModel",
    "TaskPrompts",
    "TaskSample",
    "Texts",
    "calibrate",
    "load_texts",
    "measure",
    "plot_ranking",
]
