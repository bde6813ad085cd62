"""Calibration of head policies: how much a model's loss on prompts rises when heads stream."""

from mrv1.calibration.forward import PolicyModel as PolicyModel
from mrv1.calibration.losses import Losses as Losses
from mrv1.calibration.losses import measure as measure
from mrv1.calibration.options import CalibrateOptions as CalibrateOptions
from mrv1.calibration.plot import plot_ranking as plot_ranking
from mrv1.calibration.prompts import Texts as Texts
from mrv1.calibration.prompts import load_texts as load_texts
from mrv1.calibration.run import Calibration as Calibration
from mrv1.calibration.run import calibrate as calibrate
from mrv1.calibration.tasks import TASKS as TASKS
from mrv1.calibration.tasks import TaskPrompts as TaskPrompts
from mrv1.calibration.tasks import TaskSample as TaskSample
