"""The engine that steps vLLM, and what vLLM loads of ours."""
