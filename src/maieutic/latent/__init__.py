"""The latent-state tutor: a light policy over a small student state and a few tutor moves, trained offline (arXiv 2507.16252).

A dialogue is read into a short vector (:mod:`~maieutic.latent.features`), a policy picks one of a few high-level moves
(:mod:`~maieutic.latent.moves`), and a language model words the move (:mod:`~maieutic.latent.tutor`). ``docs/latent.md`` tells
it in full, with every deviation from the paper.
"""
