"""The comparison of arms: one report from the transcripts of their held-out evaluations. Torch-free."""

from maieutic.report.comparison.compare import Comparison, compare_arms
from maieutic.report.comparison.load import Arm, load_arms
from maieutic.report.comparison.write import write_comparison

__all__ = ["Arm", "Comparison", "compare_arms", "load_arms", "write_comparison"]
