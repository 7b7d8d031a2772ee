"""Tools for whole models and tables: sizing, reports, conversion of files, logs of the program."""

from typing import TYPE_CHECKING

from shoal.base.lazy import lazy

if TYPE_CHECKING:
    from shoal.base.logs import configure_logging as configure_logging
    from shoal.tools import convert as convert
    from shoal.tools.jobs import JobEstimate as JobEstimate
    from shoal.tools.jobs import JobRates as JobRates
    from shoal.tools.jobs import estimate_job as estimate_job
    from shoal.tools.jobs import measure_job_rates as measure_job_rates
    from shoal.tools.permutation import FeatureImportance as FeatureImportance
    from shoal.tools.permutation import Importances as Importances
    from shoal.tools.permutation import importance as importance
    from shoal.tools.reports import report as report
    from shoal.tools.sizing import Estimate as Estimate
    from shoal.tools.sizing import Rates as Rates
    from shoal.tools.sizing import TierEstimate as TierEstimate
    from shoal.tools.sizing import estimate as estimate
    from shoal.tools.sizing import measure_rates as measure_rates

_NAMES_OF = {
    "": "convert",
    "shoal.base.logs": "configure_logging",
    "shoal.tools.permutation": "FeatureImportance Importances importance",
    "shoal.tools.jobs": "JobEstimate JobRates estimate_job measure_job_rates",
    "shoal.tools.reports": "report",
    "shoal.tools.sizing": "Estimate Rates TierEstimate estimate measure_rates",
}

__all__ = " ".join(_NAMES_OF.values()).split()

if not TYPE_CHECKING:  # a type checker would accept any attribute
    __getattr__ = lazy(__name__, _NAMES_OF)
