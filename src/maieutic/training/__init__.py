"""Training: from trajectories to weights, on accelerate."""
