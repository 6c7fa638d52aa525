"""Build near-transfer pairs: rewrite, verify blind, measure, gate; see :mod:`maieutic.problems.build.pipeline`."""
