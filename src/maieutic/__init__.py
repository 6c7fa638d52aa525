"""Maieutic: language-model tutors trained by multi-turn RL against frozen students.

Importing this package costs nothing: no torch, no network. The parts live in the modules named in docs/index.md.
"""

__version__ = "0.1.0.dev0"
