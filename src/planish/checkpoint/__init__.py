"""Checkpoints that load under any layout: `api` for every user, `train_state` for the pipeline.

Source: ByteCheckpoint, arXiv 2407.20143.
"""
