"""The engine that steps vLLM, and our plug-ins for vLLM."""
