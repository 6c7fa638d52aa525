"""Everything on a SLURM cluster with one command: plan, scripts and submission here, what runs inside the jobs in ``step``,
``trainer`` and ``rank``.

Torch-free: a login node needs no GPU libraries to submit.
"""
