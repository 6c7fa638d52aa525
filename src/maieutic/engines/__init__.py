"""Engines: token ids in, sampled ids and log-probs out."""
