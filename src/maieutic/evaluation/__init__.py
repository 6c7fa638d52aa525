"""Evaluation of any tutor outside training: suites, reward model, judges, and how sure the numbers are (docs/evaluation.md)."""
