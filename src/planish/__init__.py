"""Reinforcement-learning post-training of reasoning language models as a Kubeflow pipeline."""

__version__ = "0.1.0"
