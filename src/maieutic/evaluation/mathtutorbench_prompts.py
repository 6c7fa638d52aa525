"""How the tasks of MathTutorBench are asked, in this project's words; a folder of the user's own replaces any of them.

The benchmark's published prompts differ in wording (and go to a completion endpoint): for numbers to stand beside its leaderboard,
put its wording into ``mathtutorbench.prompts``.
"""

from __future__ import annotations

from pathlib import Path

from maieutic.errors import RecipeError

_BRIDGE = """{role}
Problem: {{question}}
The conversation so far:
{{dialog_history}}

Write the teacher's next turn, in at most two sentences, and nothing else."""
_SCAFFOLDING = _BRIDGE.format(
    role="You are a caring and experienced math teacher; a student is working on the problem below."
)
_PEDAGOGY = _BRIDGE.format(
    role="You are a warm, patient tutor. Lead the student step by step with questions, one question a turn; probe what they think "
    "rather than tell; bring them back gently when they stray; close when they have shown that they understand."
)

PROMPTS = {
    "problem_solving": """Solve the problem step by step. Write the result as a number after the words "Final answer".

Question: A box holds 6 cups and a shelf holds 4 boxes. Five cups are taken away. How many cups are left on the shelf?
Answer: 4 * 6 = 24 cups are on the shelf. 24 - 5 = 19 are left. Final answer: 19
Question: {question}
Answer:""",
    "socratic_questioning": """Which questions would lead a student through this problem, step by step? Write them on one line.

Problem: A box holds 6 cups and a shelf holds 4 boxes. Five cups are taken away. How many cups are left on the shelf?
Questions: How many cups are on the shelf at first? How many cups are left?
Problem: {question}
Questions:""",
    "solution_correctness": """Judge whether a student's solution is correct.

Problem: {question}
Conversation:
{dialog_history}
Student: {student_chat_solution}
Q: Is the student's solution incorrect? Answer with one word: Yes if it is incorrect, No if it is correct.
A:""",
    "mistake_location": """Find the first wrong step in a student's solution.

Problem: {question}
Student Solution:
{student_solution}
Q: Which step has the first error? Answer with the number of the step only, 0 if there is no error.
A:""",
    "mistake_correction": """Solve the problem that the student got wrong. Show the steps, and write the result after the words \
"Final Answer:".

Problem: {question}
Conversation:
{dialog_history}
Student: {student_chat_solution}""",
    "scaffolding_generation": _SCAFFOLDING,
    "scaffolding_generation_hard": _SCAFFOLDING,
    "pedagogy_following": _PEDAGOGY,
    "pedagogy_following_hard": _PEDAGOGY,
}


def prompt_of(task: str, folder: str | None) -> str:
    """The template of a task: ``<task>.txt`` of the folder where there is one. RecipeError for a folder that does not exist."""
    if folder is not None:
        if not Path(folder).is_dir():
            raise RecipeError(f"mathtutorbench.prompts: no folder {folder}")
        file = Path(folder) / f"{task}.txt"
        if file.is_file():
            return file.read_text(encoding="utf-8").rstrip("\n")
    return PROMPTS[task]
