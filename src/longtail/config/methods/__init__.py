"""The settings of each method; its equations are in `longtail.methods` and `longtail.losses`.

A file beside this one is found by itself, and its settings by the name they have in JSON; `cfg.NAME` is for those listed here.
"""

import importlib
import pkgutil

from longtail.config.methods.base import METHODS, Chunked, Deferred, LinearStage, MethodConfig
from longtail.config.methods.contrast import Centers, Contrast, GPaCo, MomentumContrast, MultiTask, PaCo, SupCon
from longtail.config.methods.networks import BBN, OLTR, RIDE, CausalNorm, ResLT
from longtail.config.methods.softmax import (
    LDAM,
    BalancedSoftmax,
    ClassBalancedFocal,
    CrossEntropy,
    Focal,
    LogitAdjustment,
)
from longtail.config.methods.stages import CRT, LWS, NCM, MiSLAS, TauNorm

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "BBN",
    "CRT",
    "LDAM",
    "LWS",
    "METHODS",
    "NCM",
    "OLTR",
    "RIDE",
    "BalancedSoftmax",
    "CausalNorm",
    "Centers",
    "Chunked",
    "ClassBalancedFocal",
    "Contrast",
    "CrossEntropy",
    "Deferred",
    "Focal",
    "GPaCo",
    "LinearStage",
    "LogitAdjustment",
    "MethodConfig",
    "MiSLAS",
    "MomentumContrast",
    "MultiTask",
    "PaCo",
    "ResLT",
    "SupCon",
    "TauNorm",
]
