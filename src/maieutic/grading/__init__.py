"""Final-answer extraction and equivalence, in killable worker processes."""

from maieutic.grading.equivalence import decide_plain, equivalent
from maieutic.grading.extraction import extract_answer
from maieutic.grading.grader import Grade, Grader, Verdict

__all__ = ["Grade", "Grader", "Verdict", "decide_plain", "equivalent", "extract_answer"]
