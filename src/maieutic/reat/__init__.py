"""REAT: tutoring with experience distilled from earlier dialogues (arXiv 2609.29804).

Dialogues are reviewed turn by turn (Observer, Critic, Mentor); what passes a quality gate becomes a problem-agnostic
*experience* in a repository, and a tutor is given the experience that fits the student's state.
"""
