"""The sft stage: a supervised cold start, or the import of a trained model."""
