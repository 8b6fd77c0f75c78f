"""The pipelines as Kubeflow sees them; they know the components and nothing behind them."""
