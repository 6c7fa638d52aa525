"""The micro-classroom: a tiny tutor and tiny sampled students, trained from scratch, in which learning shows on two CPU cores.

It brings a world (``world``), the words that are spoken in it (``speech``), scripted speakers from which the models learn
(``scripts``, ``corpus``), the models and their building (``models``, ``pretrain``, ``build``), and gates by rule (``gates``).
Everything else is the general code: problems, dialogues, environment, engines, rollout, algorithms, training, report.
"""
